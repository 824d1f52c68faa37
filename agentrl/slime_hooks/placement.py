"""From the samples that a function returned, and the generations that it requested, to the segments and turns of an episode."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from agentrl.core.sequences import first_difference
from agentrl.errors import ContractError, InvariantError
from agentrl.slime_hooks.generations import Exchange
from agentrl.train.sample import Sample
from agentrl.types import Action, Observation, Provenance, Segment, Span, Turn

Decode = Callable[[Sequence[int]], str]


@dataclass(frozen=True, slots=True)
class PlacedSamples:
    """The record of what a function returned."""

    segments: tuple[Segment, ...]
    turns: tuple[Turn, ...]
    unused: int
    """generations that no sample holds"""


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a generation stands in a sample."""

    start: int
    end: int
    number: int
    """of the exchange"""


def place_samples(
    samples: Sequence[Sample], exchanges: Sequence[Exchange], decode: Decode, *, temperature: float
) -> PlacedSamples:
    """Find the generations in the samples of one episode.

    Args:
        samples: what the function returned; each becomes a segment.
        exchanges: the generations that it requested, in order.
        decode: ids to text, for the record.
        temperature: with which they were sampled.

    Raises:
        ContractError: a sample contradicts itself, a token with loss mask 1 was not sampled after the tokens before it, or a generation is
            trained twice.
    """
    segments: list[Segment] = []
    turns: list[Turn] = []
    trained: set[int] = set()
    placed: set[int] = set()
    for number, sample in enumerate(samples):
        mask = _checked_mask(sample, number)
        places = _places(sample, exchanges)
        _check_trained(sample, mask, places, decode)
        for place in places:
            if any(mask[place.start : place.end]):
                if place.number in trained:
                    raise ContractError(
                        f"sample {number} of an episode trains generation {place.number}, which another of its samples trains too; "
                        "give it loss_mask 0 in all but one"
                    )
                trained.add(place.number)
        first_turn = len(turns)
        segments.append(_segment(sample, mask, places, exchanges, first_turn, temperature))
        turns += _turns(sample, places, exchanges, decode, number, first_turn)
        placed |= {place.number for place in places}
    return PlacedSamples(tuple(segments), tuple(turns), len(exchanges) - len(placed))


def _checked_mask(sample: Sample, number: int) -> list[int]:
    """The loss mask over all tokens of a sample; without one, the whole response is trained."""
    try:
        replace(sample, reward=None).check()  # a reward may have components that are text
    except InvariantError as e:
        raise ContractError(f"sample {number} that the function returned: {e}") from e
    if not sample.tokens:
        raise ContractError(f"sample {number} that the function returned has no tokens")
    response = [1] * sample.response_length if sample.loss_mask is None else list(sample.loss_mask)
    if sample.remove_sample:
        response = [0] * sample.response_length
    return [0] * (len(sample.tokens) - sample.response_length) + response


def _places(sample: Sample, exchanges: Sequence[Exchange]) -> list[_Place]:
    """The generations in a sample, in order, without overlaps: of several at one place the one that fits furthest, then the last."""
    tokens, response = tuple(sample.tokens), len(sample.tokens) - sample.response_length
    at: dict[int, _Place] = {}
    for number, exchange in enumerate(exchanges):
        start = len(exchange.context)
        if start < response or start >= len(tokens) or tokens[:start] != exchange.context:
            continue
        end = start + first_difference(tokens[start:], exchange.generation.ids)
        if end > start and (start not in at or end >= at[start].end):
            at[start] = _Place(start, end, number)
    places: list[_Place] = []
    for _, place in sorted(at.items()):
        if not places or place.start >= places[-1].end:
            places.append(place)
    return places


def _check_trained(sample: Sample, mask: Sequence[int], places: Sequence[_Place], decode: Decode) -> None:
    sampled = {position for place in places for position in range(place.start, place.end)}
    for position, trained in enumerate(mask):
        if trained and position not in sampled:
            token = sample.tokens[position]
            raise ContractError(
                f"token {position} of the sample ({token}, {decode([token])!r}) has loss_mask 1, but the engine did not sample it after the "
                "tokens before it; take the ids of meta_info.output_token_logprobs, never those of the text, and give all other tokens "
                "loss_mask 0"
            )


def _segment(
    sample: Sample,
    mask: Sequence[int],
    places: Sequence[_Place],
    exchanges: Sequence[Exchange],
    first_turn: int,
    temperature: float,
) -> Segment:
    """Spans of a sample: the prompt, trained stretches of generations, and everything else as observations."""
    tokens, spans = sample.tokens, []

    def add(kind: Provenance, start: int, end: int, turn: int) -> None:
        if end > start:
            spans.append(Span(kind, tuple(tokens[start:end]), turn))

    done = len(tokens) - sample.response_length
    add(Provenance.PROMPT, 0, done, -1)
    for turn, place in enumerate(places, first_turn):
        add(Provenance.OBSERVATION, done, place.start, turn - 1)
        generation, position = exchanges[place.number].generation, place.start
        for start, end, version in _stretches(mask, place, generation.versions, generation.policy_version):
            add(Provenance.OBSERVATION, position, start, turn)
            log_probs = generation.log_probs[start - place.start : end - place.start]
            spans.append(
                Span(Provenance.SAMPLED, tuple(tokens[start:end]), turn, log_probs, version, temperature or 1.0)
            )
            position = end
        add(Provenance.OBSERVATION, position, place.end, turn)
        done = place.end
    add(Provenance.OBSERVATION, done, len(tokens), first_turn + len(places) - 1)
    return Segment(tuple(spans))


def _stretches(
    mask: Sequence[int], place: _Place, versions: Sequence[tuple[int, int]], last: int
) -> list[tuple[int, int, int]]:
    """(start, end, version) of each run of trained tokens that one version of the weights sampled."""
    of_token = [version for version, count in versions for _ in range(count)]
    runs: list[tuple[int, int, int]] = []
    for position in range(place.start, place.end):
        if not mask[position]:
            continue
        version = of_token[position - place.start] if of_token else last
        if runs and runs[-1][1] == position and runs[-1][2] == version:
            runs[-1] = (runs[-1][0], position + 1, version)
        else:
            runs.append((position, position + 1, version))
    return runs


def _turns(
    sample: Sample,
    places: Sequence[_Place],
    exchanges: Sequence[Exchange],
    decode: Decode,
    segment: int,
    first_turn: int,
) -> list[Turn]:
    turns = []
    ends = [place.start for place in places[1:]] + [len(sample.tokens)]
    for index, (place, until) in enumerate(zip(places, ends, strict=True), first_turn):
        exchange = exchanges[place.number]
        between = decode(sample.tokens[place.end : until]) if until > place.end else ""
        turns.append(
            Turn(
                index=index,
                segment=segment,
                context_length=place.start,
                action=Action(decode(sample.tokens[place.start : place.end])),
                observation=Observation(({"role": "user", "content": between},) if between else ()),
                matched_stop=exchange.generation.matched_stop,
                context_crc=exchange.crc,
                seed=exchange.seed,
                timings={"generate_s": exchange.seconds, **exchange.generation.counts()},
            )
        )
    return turns
