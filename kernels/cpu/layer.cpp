// The C interface of decoder layers: leads to the kernels of an instruction set.
#include "isa.h"

DECLARE_KERNEL(void layer_start(const LayerStart&))
DECLARE_KERNEL(void layer_end(const LayerEnd&))

extern "C" {

void batchkv_layer_start(InstructionSet instruction_set, const LayerStart* start) {
  CALL_KERNEL(instruction_set, layer_start(*start));
}

void batchkv_layer_end(InstructionSet instruction_set, const LayerEnd* end) {
  CALL_KERNEL(instruction_set, layer_end(*end));
}

int32_t batchkv_layer_start_size() { return sizeof(LayerStart); }
int32_t batchkv_layer_end_size() { return sizeof(LayerEnd); }
}
