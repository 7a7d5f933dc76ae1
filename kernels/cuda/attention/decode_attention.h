/* Decode attention of our own, bf16: one query token a row. C ABI; returns are those of baton_kernels.h, without a text.
 * See decode_attention.cu and README.md. */
#ifndef BATON_DECODE_ATTENTION_H
#define BATON_DECODE_ATTENTION_H

#include <stdint.h>

#define BATON_DECODE_API __attribute__((visibility("default")))

#ifdef __cplusplus
extern "C" {
#endif

/* Bytes of `partial` when `sms` multiprocessors are filled. */
BATON_DECODE_API int64_t baton_decode_attention_workspace(int32_t sms, int32_t kv_heads, int32_t group,
                                                          int32_t head_dim);

/* q, out: [rows][kv_heads * group][head_dim], rows q_stride / out_stride elements apart. At most 1,024 rows, groups of 1
 * to 8, head dims 64 and 128.
 * k, v: this layer's keys and values of block 0; strides in elements; a block has 16 tokens, a token's head is one
 * range. The blocks of row r are pages[page_indptr[r]..] or, without page_indptr, pages[r * table_stride..].
 * kv_len: tokens of each row, the one being decoded included; 0 yields zeros.
 * window: tokens attended to, 0 for all.
 * counters: rows * kv_heads words, zeroed once; every call leaves them at zero. One call at a time may use `partial` and
 * `counters`.
 * sms: multiprocessors to fill, 0 for all. least_pages: work is not spread further than that many pages of a head a
 * block, since merging costs more than it saves; 0 for a good number. variant: 0 chooses; else warps a block * 10 + KV
 * heads side by side (41, 44, 81, 88).
 * pdl: 1 for programmatic dependent launch. Lengths, pages and all KV but the last page of a row are then read before the
 * preceding kernel has ended, so that kernel must itself have waited for its own predecessor before it let this one
 * start, as baton_skinny_gemm does; where it has not, pass 0. */
BATON_DECODE_API int32_t baton_decode_attention(const void *q, int64_t q_stride, const void *k, const void *v,
                                                int64_t stride_block, int64_t stride_head, int64_t stride_token,
                                                const int32_t *pages, const int32_t *page_indptr,
                                                int64_t table_stride, const int32_t *kv_len, void *out,
                                                int64_t out_stride, int32_t rows, int32_t kv_heads, int32_t group,
                                                int32_t head_dim, int32_t window, float scale, void *partial,
                                                int32_t *counters, int32_t sms, int32_t least_pages, int32_t variant,
                                                int32_t pdl, void *stream);

#ifdef __cplusplus
}
#endif

#endif
