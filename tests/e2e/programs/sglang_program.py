"""Programs in SGLang's frontend language, run by an environment that has it: `python sglang_program.py URL`.

Prints a JSON object with what they brought.
"""

import json
import sys
import urllib.request

import sglang as sgl

CONTEXT = "The keeper of the lighthouse wrote down every ship that passed, its flag, its course and the weather. " * 4
CHOICES = ["one", "two", "three"]
FIXED = {"temperature": 0, "ignore_eos": True}


@sgl.function
def debate(s, context):
    s += context
    forks = s.fork(3)
    for number, fork in enumerate(forks):
        fork += f"\nView {number}:"
        fork += sgl.gen("view", max_tokens=8, **FIXED)
    forks.join()
    s += "\nViews: " + " | ".join(fork["view"] for fork in forks)
    s += "\nVerdict:" + sgl.gen("verdict", max_tokens=8, **FIXED)


@sgl.function
def choose(s, context):
    s += context + "\nThe best ship is "
    s += sgl.select("best", CHOICES)


@sgl.function
def count(s):
    s += "Ships: " + sgl.gen("number", max_tokens=10, regex="[0-9]{3}")


@sgl.function
def tell(s, context):
    s += context + sgl.gen("end", max_tokens=12, **FIXED)


def lookups(url: str) -> dict:
    with urllib.request.urlopen(f"{url}/cache/stats") as response:
        stats = json.load(response)
    return {name: stats[f"hicache_{name}_tokens_total"] for name in ("lookup", "miss")}


def main(url: str) -> None:
    sgl.set_default_backend(sgl.RuntimeEndpoint(url, chat_template_name="default"))
    before = lookups(url)
    debated = debate.run(context=CONTEXT)
    debated.sync()
    after = lookups(url)
    chosen = choose.run(context=CONTEXT)
    streamed = tell.run(context=CONTEXT, stream=True)
    pieces = list(streamed.text_iter("end"))
    batch = tell.run_batch([{"context": f"{i}. {CONTEXT}"} for i in range(4)], num_threads=4)
    out = {
        "text": debated.text(),
        "verdict": debated["verdict"],
        "meta": debated.get_meta_info("verdict"),
        "tokens": {name: after[name] - before[name] for name in before},
        "chosen": chosen["best"],
        "scores": chosen.get_meta_info("best")["normalized_prompt_logprobs"],
        "number": count.run()["number"],
        "pieces": pieces,
        "whole": tell.run(context=CONTEXT)["end"],
        "batch": [state["end"] for state in batch],
    }
    print(json.dumps(out))


if __name__ == "__main__":
    main(sys.argv[1])
