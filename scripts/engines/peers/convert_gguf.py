"""Requantize a GGUF file with llama.cpp's own `llama_model_quantize`: convert_gguf.py IN OUT TYPE."""

import sys

from cyllama.llama import llama_cpp as c

TYPES = {"Q4_0": 2, "Q8_0": 7}
"""`llama_ftype`; Q4_0 leaves the output matrix (here also the embedding) in Q6_K."""


def main(source: str, target: str, name: str) -> None:
    params = c.LlamaModelQuantizeParams()
    params.ftype, params.nthread, params.allow_requantize = TYPES[name], 2, True
    c.model_quantize(source, target, params)


if __name__ == "__main__":
    main(*sys.argv[1:])
