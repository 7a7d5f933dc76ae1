/* The digest of KV blocks, by which both ends of a transfer tell whether they are the same: a part of the C ABI, with
 * the rules of baton_kernels.h. What it is and why it finds damage is said in kernels/src/digest.rs, which computes the
 * same on CPUs.
 *
 * A block may lie here with some of its heads alone: in runs of run_bytes one behind the other, of which run r begins
 * first_bytes + r * run_stride bytes into the whole block. What all parts of a block give adds up to its digest.
 */
#ifndef BATON_DIGEST_H
#define BATON_DIGEST_H

#include "baton_kernels.h"

/* *sum = the digest of these parts of blocks, the list's first block being the first of the whole. All numbers of bytes
 * are multiples of 16, as is `arena`, where block b begins b * block_bytes bytes on. `blocks` lies in host memory and
 * is read before the call returns; `sum` is device memory. */
BATON_API int32_t baton_digest_blocks(const void *arena, int64_t block_bytes, int64_t run_bytes, int64_t run_stride,
                                      int64_t first_bytes, int64_t whole_bytes, const int32_t *blocks, int32_t count,
                                      uint64_t *sum, void *stream);

#endif
