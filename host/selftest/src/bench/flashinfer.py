"""The peer of `timetable bench --device cuda`: FlashInfer on the same GPU and the same shapes, each in CUDA graph replays.

Argument: JSON with `device`, `heads`, `kv_heads`, `head_size`, `page`, and `decode` ([batch, context]), `prefill` ([batch,
tokens]) and `append` (tokens) lists. Prints one JSON object on its last line: versions, and a list of rows of `kind`, `batch`,
`context`, `backend`, `us` (median) and `plan_us`; or `absent` with the reason.
"""

import json
import statistics
import sys
import time

task = json.loads(sys.argv[1])


def finish(**answer):
    print(json.dumps(answer), flush=True)
    sys.exit(0)


try:
    import torch
    import flashinfer
except Exception as error:  # A broken installation raises anything.
    finish(absent=f"{type(error).__name__}: {error}")

torch.manual_seed(0)
torch.cuda.set_device(task["device"])
HEADS, KV_HEADS, SIZE, PAGE = task["heads"], task["kv_heads"], task["head_size"], task["page"]
options = {"device": f"cuda:{task['device']}"}
half = dict(dtype=torch.bfloat16, **options)
ints = dict(dtype=torch.int32, **options)
# Inputs of a case, over all its sets, go beyond any L2.
BEYOND_L2 = 512 << 20
rows = []


def workspace():
    return torch.zeros(256 << 20, dtype=torch.uint8, **options)


def capture(work):
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph


def replay_us(graphs, count):
    """Median microseconds of one replay, the graphs in turn, after at least 30 ms of them."""
    start = time.perf_counter()
    while time.perf_counter() - start < 0.03:
        for graph in graphs:
            graph.replay()
        torch.cuda.synchronize()
    pairs = []
    for index in range(count):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graphs[index % len(graphs)].replay()
        end.record()
        pairs.append((begin, end))
    torch.cuda.synchronize()
    return statistics.median(begin.elapsed_time(end) * 1e3 for begin, end in pairs)


def sets_for(bytes_of_one):
    return max(1, min(6, -(-BEYOND_L2 // bytes_of_one)))


def pages(batch, context):
    each = -(-context // PAGE)
    indices = torch.randperm(batch * each, **ints)
    indptr = torch.arange(batch + 1, dtype=torch.int32) * each
    last = torch.full((batch,), context - (each - 1) * PAGE, dtype=torch.int32)
    return batch * each, indptr, indices, last


def timed(plan):
    """Runs `plan` a few times; its median cost on the host in microseconds."""
    costs = []
    for _ in range(9):
        torch.cuda.synchronize()
        start = time.perf_counter()
        plan()
        costs.append((time.perf_counter() - start) * 1e6)
    return statistics.median(costs)


def decode(batch, context):
    blocks, indptr, indices, last = pages(batch, context)
    graphs, kept, plan_us = [], [], 0.0
    for _ in range(sets_for(batch * context * KV_HEADS * SIZE * 4)):
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            workspace(),
            "NHD",
            use_cuda_graph=True,
            use_tensor_cores=True,
            paged_kv_indptr_buffer=torch.zeros(batch + 1, **ints),
            paged_kv_indices_buffer=indices.clone(),
            paged_kv_last_page_len_buffer=torch.zeros(batch, **ints),
        )
        plan_us = timed(
            lambda: wrapper.plan(
                indptr, indices, last, HEADS, KV_HEADS, SIZE, PAGE,
                pos_encoding_mode="NONE", q_data_type=torch.bfloat16, kv_data_type=torch.bfloat16,
            )
        )
        cache = torch.randn(blocks, 2, PAGE, KV_HEADS, SIZE, **half)
        query = torch.randn(batch, HEADS, SIZE, **half)
        output = torch.empty_like(query)
        graphs.append(capture(lambda: wrapper.run(query, cache, out=output)))
        kept.append((wrapper, cache, query, output))
    return replay_us(graphs, 60), plan_us


def prefill(batch, tokens, backend):
    blocks, indptr, indices, last = pages(batch, tokens)
    starts = torch.arange(batch + 1, dtype=torch.int32) * tokens
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace(), "NHD", backend=backend)
    plan_us = timed(
        lambda: wrapper.plan(
            starts, indptr, indices, last, HEADS, KV_HEADS, SIZE, PAGE,
            causal=True, q_data_type=torch.bfloat16, kv_data_type=torch.bfloat16,
        )
    )
    cache = torch.randn(blocks, 2, PAGE, KV_HEADS, SIZE, **half)
    query = torch.randn(batch * tokens, HEADS, SIZE, **half)
    output = torch.empty_like(query)
    return replay_us([capture(lambda: wrapper.run(query, cache, out=output))], 15), plan_us


def append(tokens):
    requests, graphs, kept = min(256, tokens), [], []
    each = tokens // requests
    per_request = -(-each // PAGE)
    blocks = 8192
    indptr = torch.arange(requests + 1, **ints) * per_request
    last = torch.full((requests,), each - (per_request - 1) * PAGE, **ints)
    rows_of = torch.arange(tokens, **ints) // each
    positions = torch.arange(tokens, **ints) % each
    for _ in range(sets_for(2 * tokens * KV_HEADS * SIZE * 4)):
        indices = torch.randperm(blocks, **ints)
        cache = torch.zeros(blocks, 2, PAGE, KV_HEADS, SIZE, **half)
        key = torch.randn(tokens, KV_HEADS, SIZE, **half)
        value = torch.randn_like(key)
        graphs.append(
            capture(
                lambda: flashinfer.append_paged_kv_cache(
                    key, value, rows_of, positions, cache, indices, indptr, last
                )
            )
        )
        kept.append((indices, cache, key, value))
    return replay_us(graphs, 60), 0.0


def measure(kind, batch, context, backend, work):
    row = dict(kind=kind, batch=batch, context=context, backend=backend)
    try:
        row["us"], row["plan_us"] = work()
    except Exception as error:
        row["error"] = f"{type(error).__name__}: {error}".splitlines()[0][:300]
    torch.cuda.empty_cache()
    rows.append(row)
    print(json.dumps(row), file=sys.stderr, flush=True)


for batch, context in task["decode"]:
    measure("decode", batch, context, "fa2", lambda: decode(batch, context))
for batch, tokens in task["prefill"]:
    for backend in ("fa2", "fa3"):
        measure("prefill", batch, tokens, backend, lambda: prefill(batch, tokens, backend))
for tokens in task["append"]:
    measure("append", 1, tokens, "", lambda: append(tokens))
finish(flashinfer=flashinfer.__version__, torch=torch.__version__, rows=rows)
