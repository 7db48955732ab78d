// The kernels for any processor.
#include "isa.h"

#define ISA portable
#define VECTOR_FLOATS 4
#include "vectors.h"
#include "room.h"
#include "activation_impl.h"
#include "attention_task.h"
#include "attention_impl.h"
#include "linear_impl.h"
#include "norm_impl.h"
#include "rotary_impl.h"
#include "decoder_impl.h"
#include "sampling_impl.h"
