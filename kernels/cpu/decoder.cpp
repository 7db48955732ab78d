// The C interface of decoders: leads to the kernels of an instruction set.
#include "isa.h"

DECLARE_KERNEL(void pass_layer(const DecoderLayer&, const DecoderStep&))

extern "C" {

void batchkv_decode(InstructionSet instruction_set, const DecoderLayer* layers, int64_t num_layers,
                    const DecoderStep* step) {
  for (int64_t i = 0; i < num_layers; i++) CALL_KERNEL(instruction_set, pass_layer(layers[i], *step));
}

int32_t batchkv_decoder_layer_size() { return sizeof(DecoderLayer); }
int32_t batchkv_decoder_step_size() { return sizeof(DecoderStep); }
}
