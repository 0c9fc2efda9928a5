/* All functions for one set of instructions, in one translation unit; with BFLOAT16, or with PARTS (of a number, see amx.h),
 * only the one for such products.
 *
 * Headers of isa/ give the registers, the products of strips of queries and panels of keys or values, and the packing for
 * them; no other file knows the instruction set. */
#include <float.h>
#include <math.h>
#include <omp.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#if defined(PARTS)
#include "isa/amx.h"
#elif defined(__AVX512F__)
#include "isa/avx512.h"
#elif defined(__AVX__)
#include "isa/avx2.h"
#elif defined(__aarch64__)
#include "isa/neon.h"
#else
#include "isa/base.h"
#endif

#if defined(PARTS)
#include "attention.c"
#include "gradients.c"
#elif defined(BFLOAT16)
#include "isa/bfloat16.h"
#include "attention.c"
#else
#include "isa/float32.h"
#include "attention.c"
#include "decode.c"
#include "gradients.c"
#include "reductions.c"
#include "nodes.c"
#endif
