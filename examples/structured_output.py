"""Answers that have a form: JSON by a schema, one of several texts, a regular expression, a grammar.

python examples/structured_output.py
"""

from __future__ import annotations

import json

from evensong import LLM, SamplingParams

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 30},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "mood": {"enum": ["happy 😀", "tired", "curious"]},
    },
    "required": ["name", "age", "mood"],
    "additionalProperties": False,
}
FORMS = {
    "A villager, as JSON: ": {"json": PERSON},
    "Is the sea wide? Answer: ": {"choice": ["yes", "no", "nobody knows"]},
    "The year in which the harbour was built: ": {"regex": r"1[0-9]{3}|20[0-2][0-9]"},
    "A sum: ": {"grammar": 'root ::= number " + " number " = " number\nnumber ::= [1-9] [0-9]?'},
}


def main() -> None:
    with LLM("demo") as llm:
        params = [SamplingParams(seed=1, max_tokens=80, structured_outputs=form) for form in FORMS.values()]
        for prompt, output in zip(FORMS, llm.generate(list(FORMS), params, use_tqdm=False), strict=True):
            print(prompt, output.outputs[0].text)
            if "json" in FORMS[prompt]:
                json.loads(output.outputs[0].text)


if __name__ == "__main__":
    main()
