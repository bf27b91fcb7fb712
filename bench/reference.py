"""transformers' `generate` as a bench's other side: a JSON line in, the seconds it took out.

`python -m bench.reference MODEL_DIRECTORY THREADS`; a line is {"prompts": [[token, ...]], "answer": tokens}.
"""

from __future__ import annotations

import json
import sys
import time

import torch
from transformers import AutoModelForCausalLM


def main() -> None:
    path, threads = sys.argv[1], int(sys.argv[2])
    torch.set_num_threads(threads)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    for line in sys.stdin:
        job = json.loads(line)
        ids = torch.tensor(job["prompts"])
        start = time.perf_counter()
        with torch.inference_mode():
            model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=job["answer"],
                min_new_tokens=job["answer"],
                do_sample=False,
            )
        print(time.perf_counter() - start, flush=True)


if __name__ == "__main__":
    main()
