/* All functions for one set of instructions, in one translation unit; with BFLOAT16 only those that multiply bfloat16. */
#include "attention.c"
#if !defined(BFLOAT16)
#include "decode.c"
#include "gradients.c"
#endif
