// What a decoder layer computes before and after its attention, in a call each: the C interface.
//
// The kernels of its parts one after the other, on the same dtype, with the same bits as if each was called by itself. So
// linear layers of a call may share their strips.
#pragma once

#include "linear.h"
#include "norm.h"
#include "rotary.h"

extern "C" {

// From what comes into the layer to queries, keys and values. Linear layers read `normed`, and heads are turned in place.
struct LayerStart {
  const void* hidden;     // [num_tokens][width]
  void* normed;           // [num_tokens][width]
  int64_t num_tokens;
  int64_t width;
  Norm norm;
  Norm query_norm;        // of heads; without a weight there is none, as in the next
  Norm key_norm;
  Linear query;
  Linear key;
  Linear value;
  Rotary rotary;
};

// From what attention gives to what goes out of the layer, which is where `down` writes.
struct LayerEnd {
  const void* hidden;     // [num_tokens][width], what came in
  void* sums;             // [num_tokens][width]
  void* normed;           // [num_tokens][width]
  int64_t num_tokens;
  int64_t width;
  Norm norm;
  Linear projection;      // of what attention gives; writes where `down` will
  Linear gated;           // of `normed`
  Linear down;            // of what `gated` writes
};

void batchkv_layer_start(InstructionSet instruction_set, const LayerStart* start);
void batchkv_layer_end(InstructionSet instruction_set, const LayerEnd* end);

// sizeof(LayerStart), sizeof(LayerEnd): a caller that was written for others must not go on.
int32_t batchkv_layer_start_size();
int32_t batchkv_layer_end_size();
}
