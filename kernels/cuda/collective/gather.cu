// All-gather of columns: logits, of which each rank has its vocabulary shard.
#include "exchange.cuh"

namespace baton {

int32_t load_gather();

namespace {

using namespace collective;

struct Rows {
  const uint32_t* x;
  int64_t x_stride;
  uint32_t* out;
  int64_t out_stride;
  int firsts[GROUP_MAX + 1];
  int rank;
  static constexpr bool FINISHES = false;

  __device__ uint32_t read(int row, int word) const {
    if (word >= firsts[rank + 1] - firsts[rank]) return 0;
    const uint32_t value = x[row * x_stride + word];
    out[row * out_stride + firsts[rank] + word] = value;
    return value;
  }
  __device__ void take(int row, int source, int word, uint32_t value) const {
    const int column = firsts[source] + word;
    if (column < firsts[source + 1]) out[row * out_stride + column] = value;
  }
};

}  // namespace

int32_t load_gather() {
  BATON_TRY(load(exchange_rows_kernel<2, Rows>));
  BATON_TRY(load(exchange_rows_kernel<4, Rows>));
  return load(exchange_rows_kernel<8, Rows>);
}

}  // namespace baton

using namespace baton;
using namespace baton::collective;

BATON_API int32_t baton_group_gather(const baton_group* group, const baton_gather_args* args, void* stream) {
  return guarded([&]() -> int32_t {
    BATON_TRY(check_group(*group));
    BATON_REQUIRE(args->rows >= 0, "rows is %d; expected 0 or more", args->rows);
    Rows rows = {static_cast<const uint32_t*>(args->x), args->x_stride, static_cast<uint32_t*>(args->out),
                 args->out_stride,                      {},             group->rank};
    int widest = 1;
    BATON_REQUIRE(args->firsts[0] == 0, "the first rank begins at column %d; expected 0", args->firsts[0]);
    for (int rank = 0; rank < group->ranks; ++rank) {
      const int columns = args->firsts[rank + 1] - args->firsts[rank];
      BATON_REQUIRE(columns >= 0, "rank %d has %d columns; expected 0 or more", rank, columns);
      widest = std::max(widest, columns);
    }
    std::copy_n(args->firsts, group->ranks + 1, rows.firsts);
    const int own = rows.firsts[group->rank + 1] - rows.firsts[group->rank], all = rows.firsts[group->ranks];
    BATON_REQUIRE(args->x_stride >= own, "x_stride is %lld; expected at least %d",
                  static_cast<long long>(args->x_stride), own);
    BATON_REQUIRE(args->out_stride >= all, "out_stride is %lld; expected at least %d",
                  static_cast<long long>(args->out_stride), all);
    if (args->rows == 0) return BATON_OK;
    return with_ranks(group->ranks, [&](auto count) {
      return exchange_rows<decltype(count)::value>("gather", *group, rows, args->rows, widest, as_stream(stream));
    });
  });
}
