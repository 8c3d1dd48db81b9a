"""Answers that have a form, without a server: python examples/structured_output.py [MODEL]."""

from __future__ import annotations

import json
import sys

from evensong import LLM, SamplingParams

person = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 30},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "mood": {"enum": ["happy 😀", "tired", "curious"]},
    },
    "required": ["name", "age", "mood"],
    "additionalProperties": False,
}
forms = {
    "A villager, as JSON: ": {"json": person},
    "Is the sea wide? Answer: ": {"choice": ["yes", "no", "nobody knows"]},
    "The year in which the harbour was built: ": {"regex": r"1[0-9]{3}|20[0-2][0-9]"},
    "A sum: ": {"grammar": 'root ::= number " + " number " = " number\nnumber ::= [1-9] [0-9]?'},
}
llm = LLM(sys.argv[1] if len(sys.argv) > 1 else "demo")
params = [SamplingParams(seed=1, max_tokens=80, structured_outputs=form) for form in forms.values()]
for output in llm.generate(list(forms), params):
    print(output.prompt, output.outputs[0].text)
    if "JSON" in str(output.prompt):
        print(json.loads(output.outputs[0].text)["mood"])
