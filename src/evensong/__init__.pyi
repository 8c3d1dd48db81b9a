from evensong.config.resolve import EngineArgs as EngineArgs
from evensong.engine.async_llm import AsyncLLM as AsyncLLM
from evensong.engine.llm_engine import LLMEngine as LLMEngine
from evensong.entrypoints.llm import LLM as LLM
from evensong.protocol.errors import EngineDeadError as EngineDeadError
from evensong.protocol.errors import RequestError as RequestError
from evensong.protocol.request_output import CompletionOutput as CompletionOutput
from evensong.protocol.request_output import RequestOutput as RequestOutput
from evensong.protocol.sampling_params import SamplingParams as SamplingParams

__version__: str
