// The kernel for any processor.
#include "isa.h"

#define ISA portable
#define VECTOR_FLOATS 4
#include "attention_impl.h"
