// Decode attention: choice of the kernel's variant, checks, launch. The kernel is in decode_kernel.cuh.
#include <algorithm>
#include <utility>

#include "decode_kernel.cuh"

namespace baton {
namespace {

constexpr int kMaxRows = 1024;

enum class Variant {
  // Queries in registers: one query token per row, up to kMaxGroup query heads per KV head.
  FEW,         // few rows
  MANY,        // many rows
  FOUR_HEADS,  // four KV heads per CTA
  // Queries in shared memory, up to kMaxColumns columns.
  FEW_COLUMNS,
  MANY_COLUMNS,
  // Head dimension 256: tiles of eight columns.
  WIDE_ONE,
  WIDE_TWO
};

// A variant of the kernel, and its launch.
template <class Kernel>
struct Choice {
  Kernel* kernel;
  int shared_bytes;
  int warps;     // per CTA
  int sm_blocks;  // CTAs per SM
};

// Returns the choice for these columns of a row and this number of rows.
template <class KV, int HD, int WARPS, int STAGES, int HEADS, int TILES>
auto choice(int columns, int rows, int sm_blocks) {
  const int queries = TILES * 8 * (HD + KV::QUERY_PAD) * 2 + (TILES > 0 ? (rows + TILES * 8) * 4 : 0);
  const int bytes = ring_bytes<KV, HD, WARPS, STAGES>() + WARPS * columns * (HD + 4) * 4 + queries + (2 * rows + 8) * 4;
  auto* kernel = decode_attention_kernel<KV, HD, WARPS, STAGES, HEADS, TILES>;
  return Choice<std::remove_pointer_t<decltype(kernel)>>{kernel, bytes, WARPS, sm_blocks};
}

// Calls body(choice) for a variant.
template <class KV, int HD, class Body>
int32_t with_variant(Variant variant, int columns, int rows, Body&& body) {
  constexpr int S = KV::STAGES, T = KV::TILE_STAGES;
  if constexpr (HD == 256) {
    // Two CTAs with FP8 and eight columns fit on an SM.
    constexpr int BLOCKS = KV::HAS_SCALES ? 2 : 1;
    if (variant == Variant::WIDE_ONE) return body(choice<KV, HD, 4, 2, 1, 1>(columns, rows, BLOCKS));
    return body(choice<KV, HD, 4, 2, 1, 2>(columns, rows, 1));
  } else {
    switch (variant) {
      case Variant::FEW: return body(choice<KV, HD, 8, 3, 1, 0>(columns, rows, 1));
      case Variant::MANY: return body(choice<KV, HD, 4, S, 1, 0>(columns, rows, 2));
      case Variant::FOUR_HEADS: return body(choice<KV, HD, 4, S, 4, 0>(columns, rows, 2));
      case Variant::FEW_COLUMNS: return body(choice<KV, HD, 8, T, 1, 2>(columns, rows, 1));
      default: return body(choice<KV, HD, 4, T, 1, 2>(columns, rows, 2));
    }
  }
}

// Calls body(kv format, constant of the head dimension).
template <class Body>
int32_t with_format(int kv_dtype, int head_dim, Body&& body) {
  auto by_dim = [&](auto kv) {
    if (head_dim == 64) return body(kv, std::integral_constant<int, 64>());
    if (head_dim == 128) return body(kv, std::integral_constant<int, 128>());
    return body(kv, std::integral_constant<int, 256>());
  };
  return kv_dtype == BATON_FP8 ? by_dim(Fp8Kv()) : by_dim(Bf16Kv());
}

int32_t check_shape(int kv_heads, int group, int head_dim) {
  BATON_REQUIRE(kv_heads > 0, "kv_heads is %d; expected 1 or more", kv_heads);
  BATON_REQUIRE(group > 0, "group is %d; expected 1 to %d", group, kMaxColumns);
  if (group > kMaxColumns) return fail(BATON_UNSUPPORTED, "group is %d; expected 1 to %d", group, kMaxColumns);
  if (head_dim != 64 && head_dim != 128 && head_dim != 256) {
    return fail(BATON_UNSUPPORTED, "head_dim is %d; expected 64, 128 or 256", head_dim);
  }
  return BATON_OK;
}

bool is_wide(Variant variant) { return variant == Variant::WIDE_ONE || variant == Variant::WIDE_TWO; }

int columns_max(Variant variant) {
  switch (variant) {
    case Variant::FEW_COLUMNS:
    case Variant::MANY_COLUMNS:
    case Variant::WIDE_TWO: return kMaxColumns;
    default: return kMaxGroup;
  }
}

// Returns the fastest variant for these rows, parts of rows included, and columns.
Variant choose(const baton_decode_attention_args& in, int columns, int rows, int sms, const Device& device) {
  if (in.head_dim == 256) return columns <= kMaxGroup ? Variant::WIDE_ONE : Variant::WIDE_TWO;
  if (in.tokens > 1 || in.group > kMaxGroup) {
    if (rows * in.kv_heads > sms) return Variant::MANY_COLUMNS;
    bool fits = false;
    with_format(in.kv_dtype, in.head_dim, [&](auto kv, auto dim) {
      return with_variant<decltype(kv), decltype(dim)::value>(Variant::FEW_COLUMNS, columns, rows, [&](auto chosen) {
        fits = chosen.shared_bytes <= device.shared_bytes;
        return 0;
      });
    });
    return fits ? Variant::FEW_COLUMNS : Variant::MANY_COLUMNS;
  }
  if (in.rows < 16) return Variant::FEW;
  // Four heads of every row per CTA where that just fits: rows of equal length then need no merge.
  const int blocks_of_four = in.rows * (in.kv_heads / 4);
  const bool fits_four = in.kv_heads % 4 == 0 && blocks_of_four <= 2 * sms && blocks_of_four * 9 >= 2 * sms * 8;
  return fits_four && in.rows > WARP ? Variant::FOUR_HEADS : Variant::MANY;
}

int32_t check_arguments(const baton_decode_attention_args& in) {
  BATON_REQUIRE(in.rows >= 0, "rows is %d; expected 0 to %d", in.rows, kMaxRows);
  if (in.rows > kMaxRows) return fail(BATON_UNSUPPORTED, "rows is %d; expected 0 to %d", in.rows, kMaxRows);
  BATON_TRY(check_shape(in.kv_heads, in.group, in.head_dim));
  const long long width = static_cast<long long>(in.kv_heads) * in.group * in.head_dim;
  auto stride = [](const char* name, long long value, long long least, int multiple) {
    BATON_REQUIRE(value >= least && value % multiple == 0, "%s is %lld; expected multiples of %d from %lld on", name, value,
                  multiple, least);
    return static_cast<int32_t>(BATON_OK);
  };
  BATON_REQUIRE(in.kv_dtype == BATON_BF16 || in.kv_dtype == BATON_FP8, "kv_dtype is %d; expected 1 (bf16) or 2 (FP8)",
                in.kv_dtype);
  const int multiple = in.kv_dtype == BATON_FP8 ? 16 : 8;
  BATON_TRY(stride("q_stride", in.q_stride, width, 8));
  BATON_TRY(stride("out_stride", in.out_stride, width, 8));
  BATON_REQUIRE(in.stride_token == in.head_dim, "stride_token is %lld; expected head_dim, %d",
                static_cast<long long>(in.stride_token), in.head_dim);
  BATON_TRY(stride("stride_head", in.stride_head, 0, multiple));
  BATON_TRY(stride("stride_block", in.stride_block, 0, multiple));
  BATON_REQUIRE(in.tokens >= 0 && (in.tokens <= 1 || in.positions), "tokens is %d; more than 1 need positions", in.tokens);
  if (in.tokens > 1 && in.rows > kMaxRows / in.tokens) {
    return fail(BATON_UNSUPPORTED, "rows is %d with %d tokens each; their product is at most %d", in.rows, in.tokens,
                kMaxRows);
  }
  BATON_REQUIRE(in.window >= 0, "window is %d; expected 0 or more", in.window);
  BATON_REQUIRE(in.sms >= 0, "sms is %d; expected 0 or more", in.sms);
  BATON_REQUIRE(in.q && in.k && in.v && in.pages && in.page_indptr && in.kv_len && in.out && in.partial && in.counters,
                "an address is null");
  return BATON_OK;
}

}  // namespace

int32_t load_decode_attention() {
  const Device* device;
  BATON_TRY(any_device(device));
  for (int kv_dtype : {BATON_BF16, BATON_FP8}) {
    for (int dim : {64, 128, 256}) {
      const int32_t code = with_format(kv_dtype, dim, [&](auto kv, auto head_dim) -> int32_t {
        for (int i = 0; i <= static_cast<int>(Variant::WIDE_TWO); ++i) {
          const auto variant = static_cast<Variant>(i);
          if (is_wide(variant) != (dim == 256)) continue;
          BATON_TRY((with_variant<decltype(kv), decltype(head_dim)::value>(
              variant, columns_max(variant), kMaxRows, [&](auto chosen) {
                // The most columns and the most rows together may exceed the shared memory of a Hopper CTA; each alone fits.
                return load(chosen.kernel, std::min(chosen.shared_bytes, device->shared_bytes));
              })));
        }
        return BATON_OK;
      });
      BATON_TRY(code);
    }
  }
  return BATON_OK;
}

}  // namespace baton

using namespace baton;

BATON_API int64_t baton_decode_attention_workspace(int32_t sms, int32_t kv_heads, int32_t group, int32_t head_dim) {
  int64_t bytes = 0;
  guarded([&]() -> int32_t {
    BATON_REQUIRE(sms >= 0, "sms is %d; expected 0 or more", sms);
    BATON_TRY(check_shape(kv_heads, group, head_dim));
    const Device* device;
    if (sms == 0) {
      BATON_TRY(any_device(device));
      sms = device->sm_count;
    }
    // Two pieces per CTA, and per SM two CTAs of four KV heads or of the columns of draft tokens. The size grows with
    // every argument: a workspace for the greatest arguments serves all.
    const int64_t heads = (kv_heads < 4 ? kv_heads : 4) * (group < kMaxGroup ? group : kMaxGroup);
    bytes = int64_t{sms} * 2 * 2 * (heads < kMaxColumns ? kMaxColumns : heads) * (head_dim + 4) * 4;
    return BATON_OK;
  });
  return bytes;
}

BATON_API int32_t baton_decode_attention(const baton_decode_attention_args* args, void* stream) {
  return guarded([&]() -> int32_t {
    BATON_REQUIRE(args, "args is null");
    const baton_decode_attention_args& in = *args;
    BATON_TRY(check_arguments(in));
    if (in.rows == 0) return BATON_OK;
    const Device* device;
    BATON_TRY(any_device(device));
    const int sms = in.sms > 0 ? in.sms : device->sm_count;
    Params p;
    p.tokens = p.parts = p.part_tokens = 1;
    if (in.tokens > 1) {
      p.tokens = in.tokens;
      p.parts = divide_up(in.tokens, kMaxColumns / in.group);
      p.part_tokens = divide_up(in.tokens, p.parts);
    }
    const int columns = p.part_tokens * in.group, rows = in.rows * p.parts;
    const Variant variant = choose(in, columns, rows, sms, *device);
    p.q = static_cast<const bf16*>(in.q);
    p.k = in.k;
    p.v = in.v;
    p.out = static_cast<bf16*>(in.out);
    p.pages = in.pages;
    p.page_indptr = in.page_indptr;
    p.kv_len = in.kv_len;
    p.positions = in.positions;
    p.sinks = in.sinks;
    p.partial = static_cast<float*>(in.partial);
    p.counters = in.counters;
    p.q_stride = in.q_stride;
    p.out_stride = in.out_stride;
    const int element_bytes = in.kv_dtype == BATON_FP8 ? 1 : 2;
    p.block_bytes = in.stride_block * element_bytes;
    p.head_bytes = in.stride_head * element_bytes;
    p.rows = rows;
    p.kv_heads = in.kv_heads;
    p.group = in.group;
    p.window = in.window;
    p.scale_log2 = in.scale * kLog2E;
    return with_format(in.kv_dtype, in.head_dim, [&](auto kv, auto dim) {
      return with_variant<decltype(kv), decltype(dim)::value>(variant, columns, rows, [&](auto chosen) {
        if (chosen.shared_bytes > device->shared_bytes) {
          return fail(BATON_UNSUPPORTED, "%d columns and %d rows need %d bytes of shared memory; a CTA has at most %d", columns,
                      rows, chosen.shared_bytes, device->shared_bytes);
        }
        return launch_as(in.pdl != 0, "decode attention", chosen.kernel, dim3(chosen.sm_blocks * sms),
                         dim3(chosen.warps * WARP), chosen.shared_bytes, as_stream(stream), p);
      });
    });
  });
}
