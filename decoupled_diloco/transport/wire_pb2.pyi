from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Packet(_message.Message):
    __slots__ = ("frames",)
    FRAMES_FIELD_NUMBER: _ClassVar[int]
    frames: _containers.RepeatedCompositeFieldContainer[Frame]
    def __init__(self, frames: _Optional[_Iterable[_Union[Frame, _Mapping]]] = ...) -> None: ...

class Frame(_message.Message):
    __slots__ = ("envelope", "chunk", "acknowledgement", "closing")
    ENVELOPE_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    ACKNOWLEDGEMENT_FIELD_NUMBER: _ClassVar[int]
    CLOSING_FIELD_NUMBER: _ClassVar[int]
    envelope: Envelope
    chunk: Chunk
    acknowledgement: Acknowledgement
    closing: Closing
    def __init__(self, envelope: _Optional[_Union[Envelope, _Mapping]] = ..., chunk: _Optional[_Union[Chunk, _Mapping]] = ..., acknowledgement: _Optional[_Union[Acknowledgement, _Mapping]] = ..., closing: _Optional[_Union[Closing, _Mapping]] = ...) -> None: ...

class Envelope(_message.Message):
    __slots__ = ("payload_id", "payload_size", "payload_checksum", "hello", "ready", "contribution", "heartbeat", "receipt", "lacking", "farewell", "welcome", "rejection", "round_opened", "publication", "refusal", "drain_started", "run_ended")
    PAYLOAD_ID_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    HELLO_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    CONTRIBUTION_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    RECEIPT_FIELD_NUMBER: _ClassVar[int]
    LACKING_FIELD_NUMBER: _ClassVar[int]
    FAREWELL_FIELD_NUMBER: _ClassVar[int]
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    REJECTION_FIELD_NUMBER: _ClassVar[int]
    ROUND_OPENED_FIELD_NUMBER: _ClassVar[int]
    PUBLICATION_FIELD_NUMBER: _ClassVar[int]
    REFUSAL_FIELD_NUMBER: _ClassVar[int]
    DRAIN_STARTED_FIELD_NUMBER: _ClassVar[int]
    RUN_ENDED_FIELD_NUMBER: _ClassVar[int]
    payload_id: int
    payload_size: int
    payload_checksum: int
    hello: Hello
    ready: Ready
    contribution: Contribution
    heartbeat: Heartbeat
    receipt: Receipt
    lacking: Lacking
    farewell: Farewell
    welcome: Welcome
    rejection: Rejection
    round_opened: RoundOpened
    publication: Publication
    refusal: Refusal
    drain_started: DrainStarted
    run_ended: RunEnded
    def __init__(self, payload_id: _Optional[int] = ..., payload_size: _Optional[int] = ..., payload_checksum: _Optional[int] = ..., hello: _Optional[_Union[Hello, _Mapping]] = ..., ready: _Optional[_Union[Ready, _Mapping]] = ..., contribution: _Optional[_Union[Contribution, _Mapping]] = ..., heartbeat: _Optional[_Union[Heartbeat, _Mapping]] = ..., receipt: _Optional[_Union[Receipt, _Mapping]] = ..., lacking: _Optional[_Union[Lacking, _Mapping]] = ..., farewell: _Optional[_Union[Farewell, _Mapping]] = ..., welcome: _Optional[_Union[Welcome, _Mapping]] = ..., rejection: _Optional[_Union[Rejection, _Mapping]] = ..., round_opened: _Optional[_Union[RoundOpened, _Mapping]] = ..., publication: _Optional[_Union[Publication, _Mapping]] = ..., refusal: _Optional[_Union[Refusal, _Mapping]] = ..., drain_started: _Optional[_Union[DrainStarted, _Mapping]] = ..., run_ended: _Optional[_Union[RunEnded, _Mapping]] = ...) -> None: ...

class Chunk(_message.Message):
    __slots__ = ("payload_id", "data")
    PAYLOAD_ID_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    payload_id: int
    data: bytes
    def __init__(self, payload_id: _Optional[int] = ..., data: _Optional[bytes] = ...) -> None: ...

class Acknowledgement(_message.Message):
    __slots__ = ("received_bytes",)
    RECEIVED_BYTES_FIELD_NUMBER: _ClassVar[int]
    received_bytes: int
    def __init__(self, received_bytes: _Optional[int] = ...) -> None: ...

class Closing(_message.Message):
    __slots__ = ("reason",)
    REASON_FIELD_NUMBER: _ClassVar[int]
    reason: str
    def __init__(self, reason: _Optional[str] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("learner", "layout", "run_id", "incarnation", "versions", "protocol")
    LEARNER_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    learner: int
    layout: str
    run_id: str
    incarnation: int
    versions: _containers.RepeatedScalarFieldContainer[int]
    protocol: int
    def __init__(self, learner: _Optional[int] = ..., layout: _Optional[str] = ..., run_id: _Optional[str] = ..., incarnation: _Optional[int] = ..., versions: _Optional[_Iterable[int]] = ..., protocol: _Optional[int] = ...) -> None: ...

class Ready(_message.Message):
    __slots__ = ("learner", "incarnation")
    LEARNER_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    learner: int
    incarnation: int
    def __init__(self, learner: _Optional[int] = ..., incarnation: _Optional[int] = ...) -> None: ...

class Contribution(_message.Message):
    __slots__ = ("learner", "incarnation", "round", "fragment", "base_version", "steps", "tokens", "total_steps", "total_tokens", "step_seconds", "is_waiting")
    LEARNER_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    FRAGMENT_FIELD_NUMBER: _ClassVar[int]
    BASE_VERSION_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_STEPS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STEP_SECONDS_FIELD_NUMBER: _ClassVar[int]
    IS_WAITING_FIELD_NUMBER: _ClassVar[int]
    learner: int
    incarnation: int
    round: int
    fragment: int
    base_version: int
    steps: int
    tokens: int
    total_steps: int
    total_tokens: int
    step_seconds: float
    is_waiting: bool
    def __init__(self, learner: _Optional[int] = ..., incarnation: _Optional[int] = ..., round: _Optional[int] = ..., fragment: _Optional[int] = ..., base_version: _Optional[int] = ..., steps: _Optional[int] = ..., tokens: _Optional[int] = ..., total_steps: _Optional[int] = ..., total_tokens: _Optional[int] = ..., step_seconds: _Optional[float] = ..., is_waiting: bool = ...) -> None: ...

class Heartbeat(_message.Message):
    __slots__ = ("learner", "incarnation", "activity", "total_steps", "total_tokens", "tokens_per_second", "loss", "round", "adopted_round")
    LEARNER_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    ACTIVITY_FIELD_NUMBER: _ClassVar[int]
    TOTAL_STEPS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    LOSS_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    ADOPTED_ROUND_FIELD_NUMBER: _ClassVar[int]
    learner: int
    incarnation: int
    activity: str
    total_steps: int
    total_tokens: int
    tokens_per_second: float
    loss: float
    round: int
    adopted_round: int
    def __init__(self, learner: _Optional[int] = ..., incarnation: _Optional[int] = ..., activity: _Optional[str] = ..., total_steps: _Optional[int] = ..., total_tokens: _Optional[int] = ..., tokens_per_second: _Optional[float] = ..., loss: _Optional[float] = ..., round: _Optional[int] = ..., adopted_round: _Optional[int] = ...) -> None: ...

class Receipt(_message.Message):
    __slots__ = ("learner", "incarnation", "round")
    LEARNER_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    learner: int
    incarnation: int
    round: int
    def __init__(self, learner: _Optional[int] = ..., incarnation: _Optional[int] = ..., round: _Optional[int] = ...) -> None: ...

class Lacking(_message.Message):
    __slots__ = ("learner", "incarnation", "fragments")
    LEARNER_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    FRAGMENTS_FIELD_NUMBER: _ClassVar[int]
    learner: int
    incarnation: int
    fragments: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, learner: _Optional[int] = ..., incarnation: _Optional[int] = ..., fragments: _Optional[_Iterable[int]] = ...) -> None: ...

class Farewell(_message.Message):
    __slots__ = ("learner", "incarnation", "reason", "rounds")
    LEARNER_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    ROUNDS_FIELD_NUMBER: _ClassVar[int]
    learner: int
    incarnation: int
    reason: str
    rounds: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, learner: _Optional[int] = ..., incarnation: _Optional[int] = ..., reason: _Optional[str] = ..., rounds: _Optional[_Iterable[int]] = ...) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("learner", "incarnation", "run_id", "round", "last_round", "versions", "total_steps", "total_tokens", "merged_rounds", "held_rounds", "drain_first")
    LEARNER_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    LAST_ROUND_FIELD_NUMBER: _ClassVar[int]
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_STEPS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MERGED_ROUNDS_FIELD_NUMBER: _ClassVar[int]
    HELD_ROUNDS_FIELD_NUMBER: _ClassVar[int]
    DRAIN_FIRST_FIELD_NUMBER: _ClassVar[int]
    learner: int
    incarnation: int
    run_id: str
    round: int
    last_round: int
    versions: _containers.RepeatedScalarFieldContainer[int]
    total_steps: int
    total_tokens: int
    merged_rounds: _containers.RepeatedScalarFieldContainer[int]
    held_rounds: _containers.RepeatedScalarFieldContainer[int]
    drain_first: int
    def __init__(self, learner: _Optional[int] = ..., incarnation: _Optional[int] = ..., run_id: _Optional[str] = ..., round: _Optional[int] = ..., last_round: _Optional[int] = ..., versions: _Optional[_Iterable[int]] = ..., total_steps: _Optional[int] = ..., total_tokens: _Optional[int] = ..., merged_rounds: _Optional[_Iterable[int]] = ..., held_rounds: _Optional[_Iterable[int]] = ..., drain_first: _Optional[int] = ...) -> None: ...

class Rejection(_message.Message):
    __slots__ = ("learner", "reason")
    LEARNER_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    learner: int
    reason: str
    def __init__(self, learner: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class RoundOpened(_message.Message):
    __slots__ = ("round", "fragment")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    FRAGMENT_FIELD_NUMBER: _ClassVar[int]
    round: int
    fragment: int
    def __init__(self, round: _Optional[int] = ..., fragment: _Optional[int] = ...) -> None: ...

class Publication(_message.Message):
    __slots__ = ("round", "fragment", "version", "contributors", "form", "merged_round", "merged_tokens")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    FRAGMENT_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    CONTRIBUTORS_FIELD_NUMBER: _ClassVar[int]
    FORM_FIELD_NUMBER: _ClassVar[int]
    MERGED_ROUND_FIELD_NUMBER: _ClassVar[int]
    MERGED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    round: int
    fragment: int
    version: int
    contributors: _containers.RepeatedScalarFieldContainer[int]
    form: str
    merged_round: int
    merged_tokens: float
    def __init__(self, round: _Optional[int] = ..., fragment: _Optional[int] = ..., version: _Optional[int] = ..., contributors: _Optional[_Iterable[int]] = ..., form: _Optional[str] = ..., merged_round: _Optional[int] = ..., merged_tokens: _Optional[float] = ...) -> None: ...

class Refusal(_message.Message):
    __slots__ = ("learner", "incarnation", "round", "fragment", "reason", "detail")
    LEARNER_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    FRAGMENT_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    learner: int
    incarnation: int
    round: int
    fragment: int
    reason: str
    detail: str
    def __init__(self, learner: _Optional[int] = ..., incarnation: _Optional[int] = ..., round: _Optional[int] = ..., fragment: _Optional[int] = ..., reason: _Optional[str] = ..., detail: _Optional[str] = ...) -> None: ...

class DrainStarted(_message.Message):
    __slots__ = ("first_round", "seconds")
    FIRST_ROUND_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    first_round: int
    seconds: float
    def __init__(self, first_round: _Optional[int] = ..., seconds: _Optional[float] = ...) -> None: ...

class RunEnded(_message.Message):
    __slots__ = ("reason", "is_early")
    REASON_FIELD_NUMBER: _ClassVar[int]
    IS_EARLY_FIELD_NUMBER: _ClassVar[int]
    reason: str
    is_early: bool
    def __init__(self, reason: _Optional[str] = ..., is_early: bool = ...) -> None: ...
