/* Profiler ranges of the calling thread (NVTX): a part of the C ABI, with the rules of
 * baton_kernels.h. Without a profiler a range costs a few nanoseconds. Needs no GPU.
 */
#ifndef BATON_RANGES_H
#define BATON_RANGES_H

#include "baton_kernels.h"

/* Begins a range within the thread's current range. `name` is copied; `number` is shown beside it. */
BATON_API void baton_range_push(const char *name, uint64_t number);
/* Ends the thread's innermost range. */
BATON_API void baton_range_pop(void);

#endif
