/* Digests of KV blocks, which both ends of a transfer compare, and of weights: a part of the C ABI, with the rules of baton_kernels.h.
 * kernels/src/digest.rs defines the digest and computes it on CPUs.
 *
 * A rank's block has some of the heads only, in contiguous runs of run_bytes. Run r begins first_bytes + r * run_stride
 * bytes into the whole block. The digests of all parts of a block add up to its digest.
 */
#ifndef BATON_DIGEST_H
#define BATON_DIGEST_H

#include "baton_kernels.h"

/* Largest number of digests of one call. */
#define BATON_DIGESTS_MAX 128

/* is_each = 0: results_host[0] = the digest of these parts of blocks; the list's first block is the first block of the
 * digest. is_each = 1: results_host[i] = the digest of blocks[i] alone, for 1 to BATON_DIGESTS_MAX blocks. All byte
 * counts are multiples of 16, as is `arena`, where block b begins at b * block_bytes bytes. `blocks` is in host memory and
 * is read before the call returns. `sums` is device memory for one more number than there are digests. Its numbers are 0
 * before the call and after its work. The kernel writes `results_host`, pinned host memory, so no copy engine is used. */
BATON_API int32_t baton_digest_lists(const void *arena, int64_t block_bytes, int64_t run_bytes, int64_t run_stride,
                                     int64_t first_bytes, int64_t whole_bytes, const int32_t *blocks, int32_t count,
                                     int32_t is_each, uint64_t *sums, uint64_t *results_host, void *stream);

/* sums[0] = the digest of a part of a weight, sums[1] = its elements that are infinite or NaN. The part is contiguous:
 * `runs` runs of run_bytes. Run r begins first_bytes + r * run_stride bytes into the whole weight, so the digests of all
 * parts of a weight add up to its digest. All byte counts are multiples of 16, as is `data`; `sums` is device memory. */
BATON_API int32_t baton_digest_weight(int32_t dtype, const void *data, int64_t runs, int64_t run_bytes,
                                      int64_t run_stride, int64_t first_bytes, uint64_t *sums, void *stream);

#endif
