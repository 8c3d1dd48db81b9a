"""LLM: offline batches, blocking, under vLLM's argument and attribute names (spec F5)."""

from __future__ import annotations

import contextlib
import itertools
import signal
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import FrameType, TracebackType
from typing import Any

from tqdm import tqdm

from evensong.config.resolve import EngineArgs
from evensong.engine.frontend.beam_search import begin_search
from evensong.engine.frontend.chat_template import ChatTemplate
from evensong.engine.frontend.chat_tools import check_tools
from evensong.engine.frontend.input_processor import ProcessedRequest, Prompt
from evensong.engine.frontend.verbs import control_verbs
from evensong.engine.llm_engine import LLMEngine
from evensong.protocol.beam_search import BeamSearchOutput, BeamSearchParams
from evensong.protocol.errors import EngineDeadError, RequestError
from evensong.protocol.request_output import RequestOutput
from evensong.protocol.sampling_params import RequestOutputKind, SamplingParams
from evensong.sources.tokenizer import Tokenizer

Params = SamplingParams | Sequence[SamplingParams]
ProgressBar = Callable[..., Any]
Messages = Sequence[Mapping[str, Any]]
# The queue limit protects a server from its clients; a batch of one's own may be as long as it likes.
UNLIMITED_QUEUE = 2**31 - 1
# Nobody watches a batch's tokens arrive, so its steps may be long; Ctrl-C still waits for no more than one.
BATCH_STEP_SECONDS = 1.0


@control_verbs
class LLM:
    """An engine for batches of prompts. `LLM("demo")`, or any MODEL; settings as in EngineArgs.

    The core runs in a process of its own, unless `multiprocess=False`. Raises ConfigError or EngineStartError.
    """

    def __init__(self, model: str = "demo", *, multiprocess: bool = True, **settings: Any) -> None:
        settings.setdefault("max_num_queued_reqs", UNLIMITED_QUEUE)
        settings.setdefault("step_seconds", BATCH_STEP_SECONDS)
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
        timeout: float | None = None,
    ) -> list[RequestOutput]:
        """One RequestOutput per prompt, in order. Prompts are texts, lists of token ids, or dicts.

        `priority` holds one number a prompt; lower ones are more urgent. A prompt that is not done after `timeout`
        seconds ends with what it has: finish_reason "abort", stop_reason "timeout".
        Raises RequestError naming the prompt that cannot be served; then nothing of the call is left running.
        Ctrl-C ends the call's requests at the end of a step, a second one at once; the engine can be used again.
        """
        listed = _as_list(prompts)
        if priority is not None and len(priority) != len(listed):
            raise RequestError(f"{len(listed)} prompts need as many priorities, got {len(priority)}", param="priority")
        params = self._params(sampling_params, len(listed))
        options = [{"priority": own, "timeout": timeout} for own in priority or [0] * len(listed)]
        return self._run(listed, params, use_tqdm, options)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: Params | None = None,
        use_tqdm: bool | ProgressBar = True,
        *,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        timeout: float | None = None,
    ) -> list[RequestOutput]:
        """The assistant's answer to each conversation; `messages` is one conversation or a list of them.

        `continue_final_message`: the last message goes on where it ends. `chat_template` takes the place of the
        model's; `chat_template_kwargs` are variables of the template's own. `tools`, in OpenAI's form, are shown to
        the model; what it writes of them is the text.
        """
        if not messages:
            raise RequestError("messages must not be empty", param="messages")
        conversations: Sequence[Any] = [messages] if isinstance(messages[0], Mapping) else messages
        template = self.llm_engine.front.inputs.chat_template
        if chat_template is not None:
            template = ChatTemplate(chat_template, template.special_tokens)
        rendering: dict[str, Any] = {
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
            "kwargs": chat_template_kwargs,
            "tools": [tool.shown() for tool in check_tools(tools)],
        }
        prompts: list[Prompt] = []
        for index, conversation in enumerate(conversations):
            try:
                prompts.append(template.render(conversation, **rendering))
            except RequestError as error:
                raise _of_prompt(index, error) from error
        # The template writes the special tokens itself.
        params = self._params(sampling_params, len(prompts))
        options = {"add_special_tokens": False, "timeout": timeout}
        return self._run(prompts, params, use_tqdm, [options] * len(prompts))

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams,
        use_tqdm: bool | ProgressBar = False,
        *,
        timeout: float | None = None,
    ) -> list[BeamSearchOutput]:
        """The best sequences of each prompt, in order; the same in whatever company. A bar counts steps.

        Raises RequestError naming the prompt that cannot be served; then nothing of the call is left running.
        """
        if not isinstance(params, BeamSearchParams):
            raise RequestError(f"params must be BeamSearchParams, got {params!r:.60}", param="params")
        front, searches = self.llm_engine.front, []
        for index, prompt in enumerate(_as_list(prompts)):
            try:
                searches.append(begin_search(front, str(next(self._numbers)), prompt, params, timeout=timeout))
            except RequestError as error:
                raise _of_prompt(index, error) from error
        bar = _bar(use_tqdm, params.max_tokens, "Beam search steps")
        with contextlib.closing(bar) if bar is not None else contextlib.nullcontext():
            while going := [(index, search) for index, search in enumerate(searches) if not search.done]:
                requests = [(index, request) for index, search in going for request in search.requests()]
                indices, steps = zip(*requests, strict=True)
                outputs = iter(self._run(steps, [step.params for step in steps], False, [{}] * len(steps), indices))
                for _, search in going:
                    search.accept([next(outputs) for _ in range(search.num_beams)])
                if bar is not None:
                    bar.update(1)
        return [BeamSearchOutput(search.sequences()) for search in searches]

    def get_tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self.llm_engine.get_tokenizer()

    def get_default_sampling_params(self) -> SamplingParams:
        """What `generate` uses when it is given none: the model's generation_config (docs/sampling.md has the rule)."""
        return SamplingParams(**self.llm_engine.front.sampling_defaults)

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
        if not isinstance(params, (list, tuple)) or not all(isinstance(own, SamplingParams) for own in params):
            raise RequestError("sampling_params must be SamplingParams, or a list of them", param="sampling_params")
        if len(params) != count:
            raise RequestError(
                f"{count} prompts need as many sampling_params, got {len(params)}", param="sampling_params"
            )
        return list(params)

    def _run(
        self,
        prompts: Sequence[Prompt | ProcessedRequest],
        params: Sequence[SamplingParams],
        use_tqdm: bool | ProgressBar,
        options: Sequence[dict[str, Any]],
        indices: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Outputs in order; `indices`: by which number a prompt is named in errors, where it is not its place."""
        engine = self.llm_engine
        numbered = zip(indices or range(len(prompts)), prompts, params, options, strict=True)
        order: dict[str, int] = {}
        named: dict[str, int] = {}
        try:
            with _interrupts_between_steps() as check_interrupt:
                for index, prompt, own, more in numbered:
                    check_interrupt()
                    request_id = str(next(self._numbers))
                    order[request_id] = len(order)
                    named[request_id] = index
                    try:
                        own = own.clone()
                        own.output_kind = RequestOutputKind.FINAL_ONLY
                        engine.add_request(request_id, prompt, own, **more)
                    except RequestError as error:
                        raise _of_prompt(index, error) from error
                return self._collect(order, use_tqdm, check_interrupt)
        except EngineDeadError:
            raise
        except BaseException as error:
            # Also Ctrl-C: the engine stays usable, and nothing of this call goes on running.
            with contextlib.suppress(EngineDeadError):
                engine.abort_all()
            if isinstance(error, RequestError) and error.request_id in named:
                raise _of_prompt(named[error.request_id], error) from error
            raise

    def _collect(
        self, order: Mapping[str, int], use_tqdm: bool | ProgressBar, check_interrupt: Callable[[], None]
    ) -> list[RequestOutput]:
        results: list[RequestOutput | None] = [None] * len(order)
        bar = _bar(use_tqdm, len(order), "Processed prompts")
        tokens = 0
        try:
            while self.llm_engine.has_unfinished_requests():
                check_interrupt()
                for output in self.llm_engine.step():
                    if output.request_id not in order:
                        continue  # one that was added to the engine by hand
                    results[order[output.request_id]] = output
                    if bar is not None:
                        tokens += sum(len(choice.token_ids) for choice in output.outputs)
                        bar.set_postfix_str(f"{tokens} output tokens", refresh=False)
                        bar.update(1)
        finally:
            if bar is not None:
                bar.close()
        return [result for result in results if result is not None]


def _bar(use_tqdm: bool | ProgressBar, total: int, what: str) -> Any:
    """A progress bar, or None."""
    make_bar: ProgressBar = use_tqdm if callable(use_tqdm) else tqdm
    return make_bar(total=total, desc=what, dynamic_ncols=True) if use_tqdm else None


@contextlib.contextmanager
def _interrupts_between_steps() -> Iterator[Callable[[], None]]:
    """Yields a function that raises KeyboardInterrupt when Ctrl-C was pressed since; a second one raises at once.

    So no step, and no message half sent, is cut in two. Where Ctrl-C means something else already, nothing changes.
    """
    pressed = threading.Event()

    def note(number: int, frame: FrameType | None) -> None:
        if pressed.is_set():
            raise KeyboardInterrupt
        pressed.set()

    def check() -> None:
        if pressed.is_set():
            raise KeyboardInterrupt

    ours = threading.current_thread() is threading.main_thread()
    if not ours or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield check
        return
    signal.signal(signal.SIGINT, note)
    try:
        yield check
        check()
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


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
