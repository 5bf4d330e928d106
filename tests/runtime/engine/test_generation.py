"""When a request ends, and which part of its text is printed."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from alspec.config import SamplingConfig
from alspec.kernels.sampling.logprobs import Logprobs
from alspec.runtime.engine.generation import Generation, IdDecoder, Request, TokenLogprobs

EOS = 0


class Pieces:
    """A decoder: token `i` is the i-th piece. The last `held` characters are held back until more text comes."""

    def __init__(self, pieces: list[str], held: int = 0) -> None:
        self._pieces = pieces
        self._held = held
        self._waiting = ""

    def push(self, token_id: int) -> str:
        self._waiting += self._pieces[token_id]
        cut = max(0, len(self._waiting) - self._held)
        text, self._waiting = self._waiting[:cut], self._waiting[cut:]
        return text

    def flush(self) -> str:
        text, self._waiting = self._waiting, ""
        return text


def run(
    pieces: list[str],
    stop: tuple[str, ...] = (),
    token_ids: list[int] | None = None,
    held: int = 0,
    max_new_tokens: int = 10**6,
    ignore_eos: bool = False,
) -> tuple[Request, list[str]]:
    """Push tokens (default: every piece, then EOS) until the request ends; returns it and the text of each push.

    Token 0 is EOS.
    """
    sampling = SamplingConfig(stop=stop, max_new_tokens=max_new_tokens, ignore_eos=ignore_eos)
    request = Request([5, 6, 7], Pieces(["", *pieces], held), sampling, [EOS])
    printed = []
    for token_id in token_ids or [*range(1, len(pieces) + 1), EOS]:
        if request.live:
            printed.append(request.push(token_id))
    return request, printed


def cut_at_stop(text: str, stop: tuple[str, ...]) -> str:
    return text[: min((at for at in map(text.find, stop) if at >= 0), default=len(text))]


# Few letters, so that stop texts occur, overlap and begin without completing.
TEXT = st.text("ab", max_size=5)
STOPS = st.lists(st.text("ab", min_size=1, max_size=4), max_size=3).map(tuple)


@settings(max_examples=500, deadline=None)
@given(st.lists(TEXT, max_size=12), STOPS, st.integers(0, 3))
def test_text_is_cut_at_the_earliest_stop(pieces: list[str], stop: tuple[str, ...], held: int) -> None:
    """This holds for any tokens, stop texts and held-back characters.

    Of the stop texts that are complete when the first one is, the one that begins earliest cuts the text.
    """
    request, printed = run(pieces, stop, held=held)
    text = "".join(pieces)
    assert not request.live
    assert "".join(printed) == request.text
    assert not any(one in request.text for one in stop)
    assert text.startswith(request.text)
    if request.finish_reason == "stop":
        assert any(text.startswith(one, len(request.text)) for one in stop)
    else:
        assert request.finish_reason == "eos"
        assert request.text == text


@settings(max_examples=500, deadline=None)
@given(TEXT, STOPS)
def test_with_one_character_a_token_the_stop_that_ends_first_cuts(text: str, stop: tuple[str, ...]) -> None:
    """Several stop texts may end at the same character."""
    request, _ = run(list(text), stop)
    ends = [(text.find(one) + len(one), text.find(one)) for one in stop if one in text]
    first_end = min((end for end, _ in ends), default=None)
    if first_end is None:
        assert (request.text, request.finish_reason) == (text, "eos")
    else:
        assert request.text == cut_at_stop(text[:first_end], stop)
        assert len(request.token_ids) == first_end


@settings(max_examples=300, deadline=None)
@given(st.lists(TEXT, max_size=12), st.text("ab", min_size=1, max_size=4))
def test_one_stop_text_cuts_at_its_first_occurrence(pieces: list[str], stop: str) -> None:
    request, printed = run(pieces, (stop,))
    assert request.text == "".join(printed) == cut_at_stop("".join(pieces), (stop,))


@settings(max_examples=200, deadline=None)
@given(st.lists(TEXT, min_size=1, max_size=8), STOPS)
def test_only_the_beginning_of_a_stop_text_is_held_back(pieces: list[str], stop: tuple[str, ...]) -> None:
    sampling = SamplingConfig(stop=stop)
    request = Request([1], Pieces(pieces), sampling, [])
    for token_id in range(len(pieces)):
        request.push(token_id)
        if not request.live:
            return
        seen = "".join(pieces[: token_id + 1])
        waiting = seen[len(request.text) :]
        assert seen == request.text + waiting
        assert waiting == "" or any(one.startswith(waiting) for one in stop)


def test_without_stop_texts_all_text_is_printed_at_once() -> None:
    request, printed = run(["Once", " upon", " a time"])
    assert printed == ["Once", " upon", " a time", ""]
    assert request.text == "Once upon a time"
    assert request.finish_reason == "eos"
    assert request.seq_len == 3 + 4


def test_a_stop_text_may_span_tokens() -> None:
    request, printed = run(["one", " E", "N", "D", " two"], stop=(" END",))
    assert printed == ["one", "", "", ""]
    assert (request.text, request.finish_reason) == ("one", "stop")
    assert request.token_ids == [1, 2, 3, 4]


def test_an_incomplete_stop_text_is_printed() -> None:
    request, printed = run(["a E", "N", "d"], stop=(" END",))
    assert printed == ["a", "", " ENd", ""]
    assert request.text == "a ENd"


def test_a_stop_text_within_a_token_cuts_it() -> None:
    request, printed = run(["go STOP on", "more"], stop=("STOP", "on"))
    assert printed == ["go "]
    assert request.finish_reason == "stop"


def test_of_several_stop_texts_the_first_complete_one_cuts() -> None:
    assert run(["xyz"], stop=("z", "y"))[0].text == "x"
    assert run(["x", "y", "z"], stop=("yz", "xyz"))[0].text == ""
    assert run(["x", "y"], stop=("yz", "xyz"))[0].text == "xy"


def test_eos_ends_a_request() -> None:
    request, printed = run(["a", "b"], token_ids=[1, EOS, 2])
    assert printed == ["a", ""]
    assert (request.text, request.finish_reason, request.token_ids) == ("a", "eos", [1, EOS])


def test_an_ignored_eos_does_not_end_a_request() -> None:
    request, printed = run(["a", "b"], token_ids=[1, EOS, 2], ignore_eos=True)
    assert printed == ["a", "", "b"]
    assert request.live


def test_eos_releases_held_back_text() -> None:
    request, printed = run(["ab"], stop=("bc",), token_ids=[1, EOS])
    assert printed == ["a", "b"]
    assert request.finish_reason == "eos"
    assert run(["ab"], token_ids=[1, EOS], held=1)[1] == ["a", "b"]


@pytest.mark.parametrize("limit", [1, 2, 3])
def test_the_length_ends_a_request_and_releases_its_text(limit: int) -> None:
    request, printed = run(["a", "b", "c", "d"], stop=("bx", "cx"), max_new_tokens=limit)
    assert "".join(printed) == request.text == "abc"[:limit]
    assert (request.finish_reason, len(request.token_ids)) == ("length", limit)


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_a_stop_token_ends_a_request_without_printing_it(ignore_eos: bool) -> None:
    """Held-back text is printed. A token that is both EOS and a stop token counts as EOS."""
    sampling = SamplingConfig(stop=("bc",), ignore_eos=ignore_eos)
    request = Request([5], Pieces(["", "ab", "x"]), sampling, [EOS], [EOS, 2])
    assert [request.push(1), request.push(2)] == ["a", "b"]
    assert (request.text, request.finish_reason, request.token_ids) == ("ab", "stop", [1, 2])
    request = Request([5], Pieces(["", "ab"]), sampling, [EOS], [EOS])
    request.push(EOS)
    assert request.finish_reason == ("stop" if ignore_eos else "eos")


def test_length_releases_an_incomplete_character() -> None:
    assert run(["ab"], max_new_tokens=1, held=2)[0].text == "ab"


def test_eos_and_stop_precede_length_in_the_last_token() -> None:
    assert run(["a"], token_ids=[1, EOS], max_new_tokens=2)[0].finish_reason == "eos"
    assert run(["a", "b"], stop=("ab",), max_new_tokens=2)[0].finish_reason == "stop"


def test_held_back_text_may_complete_a_stop_text() -> None:
    """The end of the answer completes the stop text, which is not printed."""
    request, _ = run(["one", " END"], stop=("END",), max_new_tokens=2, held=2)
    assert (request.text, request.finish_reason) == ("one ", "stop")


def test_ids_are_printed_as_numbers() -> None:
    request = Request([1], IdDecoder(), SamplingConfig(max_new_tokens=2), [])
    assert [request.push(17), request.push(4)] == ["17 ", "4 "]
    assert request.text == "17 4 "


def test_log_probabilities_have_texts_if_there_is_a_tokenizer() -> None:
    found = Logprobs(torch.tensor([[3, 4], [7, 8]]), torch.tensor([[-1.0, -0.5], [-2.0, -0.25]]))
    for token_text, texts in ((None, (None, None)), (lambda id_: f"<{id_}>", ("<7>", ["<8>"]))):
        request = Request([1], IdDecoder(), SamplingConfig(logprobs=1), [], token_text=token_text)
        expected = TokenLogprobs(-2.0, [(8, -0.25)], *texts)
        assert request.add_logprobs(found, 1) == expected
        assert request.logprobs == [expected]


def test_each_request_of_a_batch_has_its_own_hit_rate() -> None:
    """A~ leaves tokens out from 320 on. It leaves no token of the last request out."""
    requests = [Request([1] * length, IdDecoder(), SamplingConfig(), []) for length in (320, 400, 319)]
    hits = torch.tensor([[True, False, True], [True, False, False], [True, True, True], [False, False, True]])
    tokens = Generation(requests).push([[5], [6], [7]], hits, 320)
    assert [(token.request, token.token_id, token.hit_rate) for token in tokens] == [
        (0, 5, 0.75),
        (1, 6, 0.25),
        (2, 7, None),
    ]


def test_drafts_behind_the_end_of_a_text_do_not_count() -> None:
    """One text ends inside the round, behind two of its four tokens. The other text takes all four."""
    sampling = [SamplingConfig(max_new_tokens=count) for count in (2, 9)]
    requests = [Request([1], IdDecoder(), each, []) for each in sampling]
    generation = Generation(requests)
    made = list(generation.push([[3, 4, 5, 6], [3, 4, 5, 6]], None, 0, drafts=[3, 3]))
    generation.step_us.append(1.0)
    assert [token.is_draft for token in made] == [True, False, True, True, True, False]
    assert generation.rounds == [[(1, 1), (3, 3)]]
    assert generation.tokens_of_steps == [3.0]
    list(generation.push([[7], [7, 8]], None, 0, drafts=[0, 1]))
    generation.step_us.append(1.0)
    assert generation.rounds[1] == [(1, 1)], "a request that has ended does not count"


def test_tokens_behind_the_end_of_the_short_context_are_dropped() -> None:
    """They were computed over a cache of other frequencies. Each text crosses by its own length."""
    requests = [Request([1] * length, IdDecoder(), SamplingConfig(max_new_tokens=9), []) for length in (8, 4, 11)]
    generation = Generation(requests, short_context=10)
    list(generation.push([[3], [3], [3]], None, 0))
    assert (generation.seq_lens, generation.crossing, generation.remaining) == ([9, 5, 12], [], 2)
    list(generation.push([[4, 5, 6, 7], [4], [4, 5]], None, 0, drafts=[3, 3, 3]))
    assert (generation.seq_lens, generation.crossing) == ([11, 6, 14], [0])
    assert generation.rounds == [[(1, 1), (3, 0), (3, 1)]]
    assert generation.remaining == 5
    list(generation.push([[6, 7], [5, 6], [6]], None, 0, drafts=[1, 1, 1]))
    assert (generation.seq_lens, generation.crossing) == ([13, 8, 15], [])
    assert requests[0].token_ids == [3, 4, 5, 6, 7]
