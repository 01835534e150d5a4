"""llama.cpp as a peer of the decode benchmark.

    llama_cpp_decode.py MODEL THREADS TOKENS PROMPT_TOKEN...

Writes a line of JSON once the model is loaded; then, for each line read, runs the prompt and TOKENS greedy tokens after the
first, and writes their tokens per second. Calls the C interface directly, so that Python's share of a token is microseconds.
Ends with its input. An error is a line {"error": ...}.
"""

import ctypes
import json
import os
import sys
import time


def answer(value):
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


def main():
    import llama_cpp as ll

    path, threads, count = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    prompt = [int(token) for token in sys.argv[4:]]

    model_params = ll.llama_model_default_params()
    model_params.n_gpu_layers = 0
    model = ll.llama_model_load_from_file(os.fsencode(path), model_params)
    if not model:
        raise RuntimeError(f"{path} could not be loaded")
    params = ll.llama_context_default_params()
    params.n_ctx = 1024
    params.n_threads = threads
    params.n_threads_batch = threads
    context = ll.llama_init_from_model(model, params)
    if not context:
        raise RuntimeError("no context")
    sampler = ll.llama_sampler_init_greedy()
    one = (ll.llama_token * 1)()
    many = (ll.llama_token * len(prompt))(*prompt)

    def decode(tokens, length):
        status = ll.llama_decode(context, ll.llama_batch_get_one(tokens, length))
        if status != 0:
            raise RuntimeError(f"llama_decode returned {status}")
        return ll.llama_sampler_sample(sampler, context, ctypes.c_int32(-1))

    def run():
        ll.llama_memory_clear(ll.llama_get_memory(context), True)
        tokens = [decode(many, len(prompt))]
        start = time.perf_counter()
        for _ in range(count):
            one[0] = tokens[-1]
            tokens.append(decode(one, 1))
        seconds = time.perf_counter() - start
        return {"tokens_per_second": count / seconds, "tokens": tokens}

    answer({"version": ll.__version__, "system": ll.llama_print_system_info().decode()})
    for _ in sys.stdin:
        answer(run())


try:
    main()
except Exception as error:  # The benchmark's row says it.
    answer({"error": f"{type(error).__name__}: {error}"})
    sys.exit(1)
