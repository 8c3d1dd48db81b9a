"""Log-probabilities in OpenAI's forms: exactly k best, exact bytes and offsets, and nothing that JSON cannot hold."""

from __future__ import annotations

import json

from evensong.engine.frontend.detokenizer import TokenTexts
from evensong.engine.frontend.logprobs import to_logprobs
from evensong.entrypoints.http.forms_out import TextOffsets, TokenNames, chat_logprobs, completion_logprobs
from evensong.protocol.output import TokenLogprobs
from evensong.protocol.request_output import CompletionOutput
from evensong.protocol.sampling_params import SamplingParams
from evensong.testing.byte_tokenizer import EOS_TOKEN_ID, byte_ids, byte_tokenizer

TEXTS = TokenTexts(byte_tokenizer())
NAMES = TokenNames(TEXTS, as_ids=False)
A, B, C, D = byte_ids("abcd")


def shown(position: TokenLogprobs, count: int) -> list[str]:
    choice = CompletionOutput(0, "", [position.token_ids[0]], logprobs=[to_logprobs(position, TEXTS)])
    form = chat_logprobs(choice, SamplingParams(logprobs=count), NAMES)
    assert form is not None
    return [entry["token"] for entry in form["content"][0]["top_logprobs"]]


def test_ties_do_not_add_to_the_best() -> None:
    """A sampled token that ties with the best has rank 1 as well; only the list says where it stands."""
    for count, best in ((1, ["a"]), (2, ["a", "b"]), (3, ["a", "b", "c"])):
        ids = [A, B, C][:count]
        assert shown(TokenLogprobs([B, *ids], [-1.0, *[-1.0, -1.0, -1.5][:count]], 1), count) == best
        assert shown(TokenLogprobs([A, *ids], [-1.0, *[-1.0, -1.0, -1.5][:count]], 1), count) == best
        assert shown(TokenLogprobs([D, *ids], [-9.0, *[-1.0, -1.0, -1.5][:count]], 40), count) == best
    assert shown(TokenLogprobs([A], [-1.0], 1), 0) == []
    assert shown(TokenLogprobs([A, B, D], [-1.0, -0.5, -7.0], 2, num_asked=1), 1) == ["b", "d"]


def test_bytes_are_those_of_the_text() -> None:
    ids = [*byte_ids("é👋"), EOS_TOKEN_ID]
    rows = [to_logprobs(TokenLogprobs([i], [-1.0], 1), TEXTS) for i in ids]
    choice = CompletionOutput(0, "é👋", ids, logprobs=rows, finish_reason="stop")
    form = chat_logprobs(choice, SamplingParams(logprobs=0), NAMES)
    assert form is not None and [len(entry["bytes"]) for entry in form["content"]] == [1] * 6 + [0]
    assert bytes(byte for entry in form["content"] for byte in entry["bytes"]).decode() == choice.text
    kept = SamplingParams(logprobs=0, skip_special_tokens=False, include_stop_str_in_output=True)
    form = chat_logprobs(choice, kept, NAMES)
    assert form is not None and bytes(form["content"][-1]["bytes"]) == b"<s1>"
    # A stop id is no special token, and still not in the text.
    stopped = CompletionOutput(0, "", [A], logprobs=rows[:1], finish_reason="stop", stop_reason=A)
    form = chat_logprobs(stopped, SamplingParams(logprobs=0), NAMES)
    assert form is not None and form["content"][0]["bytes"] == []


def test_parts_of_a_character_have_names_of_their_own() -> None:
    first, second = byte_ids("é")
    position = to_logprobs(TokenLogprobs([first, second, first, A], [-2.0, -1.0, -2.0, -3.0], 2), TEXTS)
    form = completion_logprobs([position], [first], TextOffsets(TEXTS, True).of([first]), 3, NAMES)
    assert form["tokens"] == ["bytes:\\xc3"]
    assert form["top_logprobs"] == [{"bytes:\\xc3": -2.0, "bytes:\\xa9": -1.0, "a": -3.0}]


def test_offsets_count_the_characters_of_the_text() -> None:
    ids = [*byte_ids("aé"), EOS_TOKEN_ID, *byte_ids("👋b")]
    assert TextOffsets(TEXTS, True).of(ids) == [0, 1, 1, 2, 2, 2, 2, 2, 3]
    assert TextOffsets(TEXTS, False).of(ids) == [0, 1, 1, 2, 6, 6, 6, 6, 7]
    assert TextOffsets(TEXTS, True, before="xyz").of(ids[:2]) == [3, 4]
    # A character that is begun and not ended shows as U+FFFD before what follows it.
    assert TextOffsets(TEXTS, True).of([*byte_ids("👋")[:2], *byte_ids("bé")]) == [0, 0, 1, 2, 2]


def test_no_number_that_json_lacks() -> None:
    low = to_logprobs(TokenLogprobs([A, B], [-3.4e38, float("-inf")], 9), TEXTS)
    form = completion_logprobs([low], [A], [0], 1, NAMES)
    assert json.loads(json.dumps(form, allow_nan=False))["token_logprobs"] == [-9999.0]
    chat = chat_logprobs(CompletionOutput(0, "", [A], logprobs=[low]), SamplingParams(logprobs=1), NAMES)
    json.dumps(chat, allow_nan=False)
