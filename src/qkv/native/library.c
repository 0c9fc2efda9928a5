/* All functions for one set of instructions, in one translation unit. */
#include "attention.c"
#include "decode.c"
#include "gradients.c"
