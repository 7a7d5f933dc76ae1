"""libbaton_kernels.so through ctypes, with torch tensors as device memory."""

import ctypes as c

import torch

P, I32, I64, U32, U64, F32 = c.c_void_p, c.c_int32, c.c_int64, c.c_uint32, c.c_uint64, c.c_float
DTYPES = {torch.float32: 0, torch.bfloat16: 1}
AUTO, PLAIN, FA2, FA3 = range(4)
BF16, FP8 = 1, 2
TOP_MAX = 32


def struct(name, **fields):
    return type(name, (c.Structure,), {"_fields_": [(key.rstrip("_"), kind) for key, kind in fields.items()]})


Kv = struct("Kv", base=P, block_elements=I64, block_count=I32, layer_count=I32, head_count=I32, head_dim=I32,
            dtype=I32, reserved=I32)
RopeArgs = struct("RopeArgs", qkv=P, queries=P, query_stride=I64, bias=P, query_norm=P, key_norm=P, frequencies=P,
                  positions=P, destinations=P, norm_eps=F32, query_heads=I32, layer=I32, rows=I32, rotary_dim=I32,
                  norms_all_heads=I32)
Sampling = struct("Sampling", seed=U64, temperature=F32, top_p=F32, min_p=F32, repetition_penalty=F32,
                  presence_penalty=F32, frequency_penalty=F32, top_k=U32, min_tokens=U32, stop_count=I32,
                  logprobs=I32, prompt_len=I32, bias_count=c.c_uint16, is_listed=c.c_uint16, bad_count=I32,
                  prompt_logprobs=I32)
Slot = struct("Slot", position=I32, length=I32, failed=I32, drafts=I32)
Pool = struct("Pool", slots=P, sampling=P, tokens=P, block_tables=P, stop_tokens=P, rules=P, slot_count=I32, token_width=I32,
              table_width=I32, stop_width=I32, trash_block=I32, rule_width=I32, zero_block=I32, group_count=I32,
              windows=I32 * 16, adapters=P)
PlanHeader = struct("PlanHeader", word_count=U32, sequence_count=U32, row_count=U32, sample_count=U32,
                    admission_count=U32, run_count=U32, sequences_at=U32, admissions_at=U32, runs_at=U32,
                    step_id=U32, reserved=U32 * 6)
PlanSequence = struct("PlanSequence", slot=I32, row_count=I32, sample_count=I32, reserved=I32)
PlanAdmission = struct("PlanAdmission", slot=I32, adapter=I32, reserved=I32 * 2, state=Slot, sampling=Sampling)
PlanRun = struct("PlanRun", target=I32, slot=I32, first=I32, count=I32, at=U32)
STEP_ARRAYS = ("row_tokens row_positions row_destinations row_sequences row_indptr page_indptr page_indices "
               "last_page_tokens kv_lengths sequence_slots sampled_rows sample_slots sample_masks counts").split()
ADAPTER_ARRAYS = ("row_adapters", "sample_adapters")
Step = struct("Step", **{name: P for name in STEP_ARRAYS}, rows_max=I32, sequences_max=I32, pages_max=I32,
              samples_max=I32, **{name: P for name in ADAPTER_ARRAYS})
Shape = struct("Shape", query_heads=I32, kv_heads=I32, head_dim=I32, dtype=I32, window=I32, scale=F32)
Batch = struct("Batch", row_indptr=P, page_indptr=P, kv_lengths=P, sequences=I32, rows=I32)
Workspace = struct("Workspace", floats=P, float_bytes=U64, ints=P, int_bytes=U64, pinned=P)
AttentionPlan = struct("AttentionPlan", kind=I32, word_count=I32, words=I64 * 22)
SampleResult = struct("SampleResult", status=I32, token=I32, slot=I32, position=I32, logprob=F32, top_count=I32,
                      step_id=U32, detail=I32)
TokenLogprob = struct("TokenLogprob", token=I32, logprob=F32)
SampleArgs = struct("SampleArgs", logits=P, logit_stride=I64, masks=P, results=P, top=P, scratch=P,
                    scratch_bytes=U64, vocabulary=I32, samples=I32, needs=I32, verifies=I32)
QuantizeArgs = struct("QuantizeArgs", x=P, x_stride=I64, residual=P, norm=P, mirror=P, out=P, scales=P, eps=F32, source=I32,
                      rows=I32, width=I32, parts=I32, reserved=I32)
LowRank = struct("LowRank", a=P, b=P, ranks=P, row_adapters=P, shrunk=P, progress=P, firsts=I32 * 2, ranges=I32, rank_max=I32,
                 slots=I32, parts=I32)
SkinnyArgs = struct("SkinnyArgs", weight=P, weight_scales=P, x=P, x_scales=P, x_stride=I64, squares=P, bias=P, out=P, out_stride=I64, residual=P,
                    mirror=P, next_norm=P, squares_out=P, k=P, v=P, stride_block=I64, stride_head=I64,
                    stride_token=I64, frequencies=P, positions=P, destinations=P, eps=F32, rows=I32, n=I32, depth=I32,
                    epilogue=I32, query_heads=I32, kv_heads=I32, head_dim=I32, grid=I32, tile=I32, pdl=I32,
                    squares_count=I32, weight_block=I32, parts=I32, low_rank=LowRank)
DecodeArgs = struct("DecodeArgs", q=P, q_stride=I64, k=P, v=P, stride_block=I64, stride_head=I64, stride_token=I64,
                    pages=P, page_indptr=P, kv_len=P, out=P, out_stride=I64, partial=P, counters=P, rows=I32,
                    kv_heads=I32, group=I32, head_dim=I32, window=I32, scale=F32, sms=I32, pdl=I32, tokens=I32,
                    kv_dtype=I32, positions=P, sinks=P)
Group = struct("Group", arenas=P * 8, arena_bytes=I64, fault=P, timeout_ns=I64, rank=I32, ranks=I32)
AllReduceArgs = struct("AllReduceArgs", x=P, out=P, residual=P, weight=P, eps=F32, dtype=I32, rows=I32, width=I32,
                       algorithm=I32, pdl=I32)
GatherArgs = struct("GatherArgs", x=P, x_stride=I64, out=P, out_stride=I64, firsts=I32 * 9, rows=I32,
                    reserved=I32 * 2)
RouteArgs = struct("RouteArgs", x=P, x_stride=I64, squares=P, router=P, logits=P, bias=P, split=P, expert_of=P,
                   weights=P, scales=P, offsets=P, order=P, arrivals=P, eps=F32, squares_count=I32, rows=I32,
                   hidden=I32, experts=I32, count=I32, is_normalized=I32, score=I32, groups=I32,
                   groups_chosen=I32, scale=F32, reserved=I32)
ExpertGemmArgs = struct("ExpertGemmArgs", weight=P, weight_stride=I64, x=P, x_stride=I64, scales=P, out=P,
                        out_stride=I64, offsets=P, order=P, weight_scales=P, weight_scales_stride=I64, factors=P,
                        rows=I32, experts=I32, count=I32, n=I32, depth=I32, is_gate_up=I32, grid=I32, pdl=I32,
                        parts=I32, factor_stride=I32)
Mxfp4GemmArgs = struct("Mxfp4GemmArgs", weight=P, weight_stride=I64, bias=P, bias_stride=I64, x=P, x_stride=I64, scales=P,
                       out=P, out_stride=I64, offsets=P, order=P, sorted=P, rows=I32, experts=I32, count=I32, n=I32, depth=I32,
                       is_gate_up=I32, grid=I32, pdl=I32, alpha=F32, limit=F32)
CombineArgs = struct("CombineArgs", outputs=P, weights=P, residual=P, norm=P, out=P, quantized=P, scales=P, shared=P,
                     shared_router=P, x=P, x_stride=I64, eps=F32, count=I32, rows=I32, width=I32, parts=I32, reserved=I32)
NEEDS_DRAW, NEEDS_CUT, NEEDS_LOGPROBS, NEEDS_PENALTIES, NEEDS_RULES, NEEDS_ALL = 1, 2, 4, 8, 16, 31
STRUCTS = [QuantizeArgs, Kv, RopeArgs, Sampling, Slot, Pool, PlanHeader, PlanSequence, PlanAdmission, PlanRun, Step, Shape, Batch,
           Workspace, AttentionPlan, SampleResult, TokenLogprob, SampleArgs, LowRank, SkinnyArgs, DecodeArgs, Group,
           AllReduceArgs, GatherArgs, RouteArgs, ExpertGemmArgs, Mxfp4GemmArgs, CombineArgs]

ARGUMENTS = {
    "initialise": [],
    "embed": [I32, P, I32, I32, F32, P, P, I32, I32],
    "rms_norm": [I32, P, P, F32, P, I32, I32],
    "rms_norm_in_place": [I32, P, P, F32, I32, I32],
    "add_rms_norm": [I32, P, P, P, F32, P, I32, I32],
    "add_bias": [I32, P, P, I32, I32],
    "activate": [I32, I32, P, P, I32, I32],
    "quantize": [P],
    "gather_rows": [I32, P, P, P, I32, I32],
    "rope_store_kv": [P, P],
    "dequantize_kv": [P, I32, P, I32, P],
    "step_prepare": [P, P, P, I32, I32, I32, I32],
    "step_supply": [P, P, P, I32],
    "attention_prepare": [I32, P, P, P, P],
    "attention_run": [P, P, P, P, I32, P, I64, P, P, P, I32, I32],
    "sample": [P, P, P],
    "skinny_gemm": [P],
    "decode_attention": [P],
    "delay": [I64],
    "read_stream": [P, U64, P],
}


class Error(Exception):
    def __init__(self, code, text):
        super().__init__(f"{code}: {text}")
        self.code = code


class Library:
    """Calls the library's functions by name. Passes tensors as addresses, structs by reference, and torch's current stream."""

    def __init__(self, path):
        self.raw = c.CDLL(path)
        self.raw.baton_build_info.restype = self.raw.baton_last_error.restype = c.c_char_p
        self.raw.baton_group_sample_scratch_bytes.restype = U64
        self.raw.baton_decode_attention_workspace.restype = I64
        for name, kinds in ARGUMENTS.items():
            function = getattr(self.raw, f"baton_{name}")
            function.argtypes = kinds + ([] if name == "initialise" else [P])
            function.restype = I32

    def __getattr__(self, name):
        function = getattr(self.raw, f"baton_{name}")

        def call(*arguments):
            plain = [self.address(argument) for argument in arguments]
            if name != "initialise":
                plain.append(torch.cuda.current_stream().cuda_stream)
            code = function(*plain)
            if code != 0:
                raise Error(code, self.raw.baton_last_error().decode())

        return call

    @staticmethod
    def address(argument):
        if isinstance(argument, torch.Tensor):
            return argument.data_ptr()
        if isinstance(argument, c.Structure):
            return c.addressof(argument)
        return argument


def ints(values):
    return torch.tensor(values, dtype=torch.int32, device="cuda")


class StepArrays:
    """Device arrays of a step, filled with poison values."""

    def __init__(self, rows, sequences, pages, samples, groups=1):
        sizes = dict.fromkeys((*STEP_ARRAYS, *ADAPTER_ARRAYS), 0)
        for name in sizes:
            sizes[name] = (8 if name == "counts" else samples if name.startswith("sample") else groups * pages
                           if name == "page_indices" else groups * rows if name == "row_destinations" else rows
                           if name in (*STEP_ARRAYS[:4], "row_adapters") else sequences + 1)
        self.tensors = {name: torch.full((max(size, 1),), -77, dtype=torch.int32, device="cuda")
                        for name, size in sizes.items()}
        self.struct = Step(**{name: tensor.data_ptr() for name, tensor in self.tensors.items()}, rows_max=rows,
                           sequences_max=sequences, pages_max=pages, samples_max=samples)

    def __getattr__(self, name):
        return self.tensors[name]

    def fill(self, **values):
        for name, value in values.items():
            self.tensors[name][: len(value)] = ints(value)


def kv_arena(blocks, layers, heads, dim, dtype, fill=float("nan")):
    """Returns a tensor [block][layer][half][head][token][dim] and its baton_kv."""
    tensor = torch.full((blocks, layers, 2, heads, 16, dim), fill, dtype=dtype, device="cuda")
    return tensor, Kv(tensor.data_ptr(), tensor[0].numel(), blocks, layers, heads, dim, DTYPES[dtype], 0)


def fp8_arena(blocks, layers, heads, dim):
    """Returns a tensor [block][layer][half][head][16 * (dim + 1)] of NaN codes with the largest scale, and its baton_kv."""
    tensor = torch.full((blocks, layers, 2, heads, 16 * (dim + 1)), 0x7F, dtype=torch.uint8, device="cuda")
    tensor[..., 16 * dim :] = 255
    return tensor, Kv(tensor.data_ptr(), tensor[0].numel(), blocks, layers, heads, dim, FP8, 0)


class AttentionMemory:
    def __init__(self, float_mib=256, int_mib=8):
        self.floats = torch.empty(float_mib << 18, dtype=torch.float32, device="cuda")
        self.ints = torch.empty(int_mib << 18, dtype=torch.int32, device="cuda")
        self.pinned = torch.empty(int_mib << 18, dtype=torch.int32, pin_memory=True)
        self.struct = Workspace(self.floats.data_ptr(), self.floats.numel() * 4, self.ints.data_ptr(),
                                self.ints.numel() * 4, self.pinned.data_ptr())


class Sequences:
    """Sequences given as (rows of this step, total tokens). Their blocks are drawn at random from `free`."""

    def __init__(self, shapes, free, padding=0, trash=0, rows_max=None):
        import random
        blocks = list(free)
        random.shuffle(blocks)
        self.shapes = list(shapes)
        self.tables, positions, destinations, owners = [], [], [], []
        for index, (rows, length) in enumerate(self.shapes):
            table = [blocks.pop() for _ in range((length + 15) // 16)]
            self.tables.append(table)
            for position in range(length - rows, length):
                positions.append(position)
                destinations.append(table[position // 16] * 16 + position % 16)
                owners.append(index)
        self.real_rows = len(positions)
        for index in range(padding):
            self.shapes.append((1, 1))
            self.tables.append([trash])
            positions.append(0)
            destinations.append(trash * 16)
            owners.append(len(self.shapes) - 1)
        self.rows, self.count = len(positions), len(self.shapes)
        self.row_indptr, self.page_indptr = [0], [0]
        for (rows, _), table in zip(self.shapes, self.tables):
            self.row_indptr.append(self.row_indptr[-1] + rows)
            self.page_indptr.append(self.page_indptr[-1] + len(table))
        pages = [block for table in self.tables for block in table]
        self.lengths = [length for _, length in self.shapes]
        self.positions, self.owners = positions, owners
        self.step_values = dict(
            row_positions=positions, row_destinations=destinations, row_sequences=owners,
            row_indptr=self.row_indptr, page_indptr=self.page_indptr, page_indices=pages,
            last_page_tokens=[(length - 1) % 16 + 1 for length in self.lengths], kv_lengths=self.lengths)
        self.pages = len(pages)
        self.host = [torch.tensor(values, dtype=torch.int32) for values in
                     (self.row_indptr, self.page_indptr, self.lengths)]

    def step(self):
        arrays = StepArrays(max(self.rows, 1), self.count, max(self.pages, 1), 1)
        arrays.fill(**self.step_values)
        return arrays

    def batch(self):
        return Batch(*[tensor.data_ptr() for tensor in self.host], self.count, self.rows)
