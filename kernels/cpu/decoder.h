// The layers of a decoder such as Llama's, one after the other in one call: the C interface.
//
// The kernels are those of a layer's parts, on one dtype, with the same bits as if each was called by itself.
#pragma once

#include "attention.h"
#include "linear.h"
#include "norm.h"
#include "rotary.h"

extern "C" {

struct DecoderLayer {
  Norm input_norm;
  Norm query_norm;     // of heads; without a weight there is none, as in the next
  Norm key_norm;
  Norm post_norm;
  Linear query;        // linear layers lack what they read and write
  Linear key;
  Linear value;
  Linear projection;   // of what attention gives
  Linear gated;
  Linear down;
  float scale;         // of scores
  const Pages* pages;  // of keys and values in the layers' dtype, or int8 where that is fp32
  const Batch* batch;  // tokens behind those of the batch attend to nothing
};

// Tokens on their way through the layers, and room for what they are between. Rows of numbers are of the layers' dtype.
struct DecoderStep {
  void* hidden;      // [num_tokens][width], what comes in, then what goes out
  const void* cos;   // [num_tokens][head_dim]
  const void* sin;
  void* normed;      // [num_tokens][width]
  void* query;       // [num_tokens][query_heads][head_dim]
  void* key;         // [num_tokens][key_heads][head_dim]
  void* value;       // [num_tokens][key_heads][head_dim]
  void* attended;    // [num_tokens][query_heads][head_dim]
  void* inner;       // [num_tokens][inner features of the MLP]
  float* strips;        // as linear layers need them, of any rows but inner ones
  float* inner_strips;
  int64_t num_tokens;
  int32_t query_heads;
  int32_t key_heads;
  int32_t head_dim;
  int32_t dtype;
};

void batchkv_decode(InstructionSet instruction_set, const DecoderLayer* layers, int64_t num_layers,
                    const DecoderStep* step);

// sizeof(DecoderLayer), sizeof(DecoderStep): a caller that was written for others must not go on.
int32_t batchkv_decoder_layer_size();
int32_t batchkv_decoder_step_size();
}
