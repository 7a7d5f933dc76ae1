/* Ranges of the calling thread's time, as profilers show them (NVTX): a part of the C ABI, with the rules of
 * baton_kernels.h. Where no profiler is attached they cost a few nanoseconds. Needs no GPU.
 */
#ifndef BATON_RANGES_H
#define BATON_RANGES_H

#include "baton_kernels.h"

/* Begins one within the thread's present one. `name` is copied; `number` is shown beside it. */
BATON_API void baton_range_push(const char *name, uint64_t number);
/* Ends the one that the thread began last. */
BATON_API void baton_range_pop(void);

#endif
