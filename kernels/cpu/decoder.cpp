// The C interface of decoders: leads to the kernels of an instruction set.
#include "isa.h"

DECLARE_KERNEL(void pass_layers(const DecoderLayer*, int64_t, const DecoderStep&))

extern "C" {

void batchkv_decode(InstructionSet instruction_set, const DecoderLayer* layers, int64_t num_layers,
                    const DecoderStep* step) {
  CALL_KERNEL(instruction_set, pass_layers(layers, num_layers, *step));
}

int32_t batchkv_decoder_layer_size() { return sizeof(DecoderLayer); }
int32_t batchkv_decoder_step_size() { return sizeof(DecoderStep); }
}
