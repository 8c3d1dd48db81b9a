"""LLM: offline batches, blocking, under vLLM's argument and attribute names (spec F5)."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any

from tqdm import tqdm

from evensong.config.resolve import EngineArgs
from evensong.engine.frontend.input_processor import Prompt
from evensong.engine.frontend.verbs import control_verbs
from evensong.engine.llm_engine import LLMEngine
from evensong.protocol.errors import RequestError
from evensong.protocol.request_output import RequestOutput
from evensong.protocol.sampling_params import RequestOutputKind, SamplingParams
from evensong.sources.tokenizer import Tokenizer

Params = SamplingParams | Sequence[SamplingParams]
ProgressBar = Callable[..., Any]
Messages = Sequence[Mapping[str, Any]]


@control_verbs
class LLM:
    """An engine for batches of prompts. `LLM("demo")`, or any MODEL; settings as in EngineArgs.

    The core runs in a process of its own, unless `multiprocess=False`. Raises ConfigError or EngineStartError.
    """

    def __init__(self, model: str = "demo", *, multiprocess: bool = True, **settings: Any) -> None:
        self.llm_engine = LLMEngine.from_engine_args(EngineArgs(model, **settings), multiprocess=multiprocess)
        self._numbers = itertools.count()
        self._finalizer = weakref.finalize(self, self.llm_engine.shutdown)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: Params | None = None,
        use_tqdm: bool | ProgressBar = True,
        *,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """One RequestOutput per prompt, in order. Prompts are texts, lists of token ids, or dicts.

        Raises RequestError naming the prompt that cannot be served; then nothing of the call is left running.
        """
        listed = _as_list(prompts)
        return self._run(listed, self._params(sampling_params, len(listed)), use_tqdm, priority=priority)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: Params | None = None,
        use_tqdm: bool | ProgressBar = True,
        *,
        add_generation_prompt: bool = True,
    ) -> list[RequestOutput]:
        """The assistant's answer to each conversation; `messages` is one conversation or a list of them."""
        conversations = [messages] if messages and isinstance(messages[0], Mapping) else messages
        template = self.llm_engine.front.inputs.chat_template
        prompts: list[Prompt] = [
            template.render(conversation, add_generation_prompt=add_generation_prompt)  # type: ignore[arg-type]  # either form
            for conversation in conversations
        ]
        # The template writes the special tokens itself.
        params = self._params(sampling_params, len(prompts))
        return self._run(prompts, params, use_tqdm, add_special_tokens=False)

    def get_tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self.llm_engine.get_tokenizer()

    def get_default_sampling_params(self) -> SamplingParams:
        """What `generate` uses when it is given none."""
        return SamplingParams()

    def call_verb(self, verb: str, **args: Any) -> Any:
        """Result of a control verb (protocol/control.py)."""
        return self.llm_engine.call_verb(verb, **args)

    def shutdown(self) -> None:
        """Ends the engine; safe to call twice, and called when the object is collected or Python exits."""
        self._finalizer()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()

    def _params(self, params: Params | None, count: int) -> list[SamplingParams]:
        if params is None:
            params = self.get_default_sampling_params()
        if isinstance(params, SamplingParams):
            return [params] * count
        if len(params) != count:
            raise RequestError(
                f"{count} prompts need as many sampling_params, got {len(params)}", param="sampling_params"
            )
        return list(params)

    def _run(
        self,
        prompts: Sequence[Prompt],
        params: Sequence[SamplingParams],
        use_tqdm: bool | ProgressBar,
        *,
        priority: Sequence[int] | None = None,
        **options: Any,
    ) -> list[RequestOutput]:
        engine = self.llm_engine
        order: dict[str, int] = {}
        try:
            for index, (prompt, own) in enumerate(zip(prompts, params, strict=True)):
                request_id = str(next(self._numbers))
                order[request_id] = index
                own = own.clone()
                own.output_kind = RequestOutputKind.FINAL_ONLY
                try:
                    engine.add_request(request_id, prompt, own, priority=priority[index] if priority else 0, **options)
                except RequestError as error:
                    raise _of_prompt(index, error) from error
            return self._collect(order, use_tqdm)
        except BaseException:
            # Also Ctrl-C: the engine stays usable, and nothing of this call goes on running.
            engine.abort_all()
            raise

    def _collect(self, order: Mapping[str, int], use_tqdm: bool | ProgressBar) -> list[RequestOutput]:
        results: list[RequestOutput | None] = [None] * len(order)
        make_bar: ProgressBar = use_tqdm if callable(use_tqdm) else tqdm
        bar = make_bar(total=len(order), desc="Processed prompts", dynamic_ncols=True) if use_tqdm else None
        tokens = 0
        try:
            while self.llm_engine.has_unfinished_requests():
                for output in self.llm_engine.step():
                    results[order[output.request_id]] = output
                    if bar is not None:
                        tokens += sum(len(choice.token_ids) for choice in output.outputs)
                        bar.set_postfix_str(f"{tokens} output tokens", refresh=False)
                        bar.update(1)
        finally:
            if bar is not None:
                bar.close()
        return [result for result in results if result is not None]


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Prompts as a list: one text, one dict or one list of token ids stands for itself."""
    if isinstance(prompts, (str, Mapping)):
        return [prompts]
    if prompts and isinstance(prompts[0], int):
        return [prompts]  # type: ignore[list-item]  # a list of token ids
    listed: Iterable[Any] = prompts
    return list(listed)


def _of_prompt(index: int, error: RequestError) -> RequestError:
    body = error.body()
    return RequestError(
        f"prompt {index}: {body.message}", status=body.status, type=body.type, param=body.param, code=body.code
    )
