"""Loading tokenizer.json, encoding, and the incremental detokeniser against the library's own decode."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_tokenizer import build_tokenizer
from tokenizers import processors

from runtime.errors import ArtifactError
from runtime.tokenizer import Detokenizer, encode, load_tokenizer

BOS, EOS, USER, THINK_END = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "</think>"


@pytest.fixture(scope="module")
def tokenizer():
    return build_tokenizer()


@pytest.fixture
def directory(tmp_path, tokenizer):
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def stream(tokenizer, ids):
    detokenizer = Detokenizer(tokenizer)
    return [detokenizer.push(token_id) for token_id in ids] + [detokenizer.finish()]


def test_load_round_trip(directory):
    loaded = load_tokenizer(directory)
    ids = encode(loaded, "hello 我们")
    assert loaded.decode(ids) == "hello 我们"


def test_load_without_a_file(tmp_path):
    assert load_tokenizer(tmp_path) is None


def test_load_switches_truncation_and_padding_off(tmp_path):
    cut = build_tokenizer()
    cut.enable_truncation(max_length=2)
    cut.enable_padding(length=50)
    cut.save(str(tmp_path / "tokenizer.json"))
    assert encode(load_tokenizer(tmp_path), "x y z q") == encode(build_tokenizer(), "x y z q")


def cut_in_half(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def drop_the_model(path):
    raw = json.loads(path.read_text(encoding="utf-8"))
    del raw["model"]
    path.write_text(json.dumps(raw), encoding="utf-8")


def choose_another_decoder(path):
    raw = json.loads(path.read_text(encoding="utf-8"))
    raw["decoder"] = None
    path.write_text(json.dumps(raw), encoding="utf-8")


def write_binary(path):
    path.write_bytes(b"\xff\xfe\x00")


def make_a_directory(path):
    path.unlink()
    path.mkdir()


DAMAGES = [cut_in_half, drop_the_model, choose_another_decoder, write_binary, make_a_directory]


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_one_line(directory, damage):
    damage(directory / "tokenizer.json")
    with pytest.raises(ArtifactError, match=r"not a usable tokenizer .* expected the byte-level .* fetch") as caught:
        load_tokenizer(directory)
    assert str(caught.value).startswith(str(directory / "tokenizer.json"))
    assert "\n" not in str(caught.value)


def test_encode_adds_no_bos_where_the_tokenizer_would():
    eager = build_tokenizer()
    eager.post_processor = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, 0)])
    assert eager.encode("h").ids[0] == 0
    assert encode(eager, "h") == [eager.token_to_id("h")]


def test_encode_adds_nothing_and_parses_role_tokens(tokenizer):
    ids = encode(tokenizer, f"{BOS}{USER}x{THINK_END}")
    assert ids == [tokenizer.token_to_id(token) for token in (BOS, USER, "x", THINK_END)]


def test_encode_of_nothing(tokenizer):
    assert encode(tokenizer, "") == []


def test_a_character_appears_with_its_last_byte(tokenizer):
    ids = [tokenizer.token_to_id(token) for token in ("æ", "Ī", "ĳ")]  # bytes E6 88 91, the alphabet's names for 我
    assert tokenizer.decode(ids) == "我"
    assert stream(tokenizer, ids) == ["", "", "我", ""]


def test_an_incomplete_character_is_replaced_at_the_end(tokenizer):
    ids = [tokenizer.token_to_id(token) for token in ("h", "æ", "Ī")]
    assert stream(tokenizer, ids) == ["h", "", "", "�"]


def test_an_incomplete_character_is_replaced_when_another_begins(tokenizer):
    ids = [tokenizer.token_to_id(token) for token in ("æ", "h")]
    assert stream(tokenizer, ids) == ["", "�h", ""]


def test_special_tokens_are_skipped_and_the_think_mark_is_not(tokenizer):
    ids = [tokenizer.token_to_id(token) for token in (BOS, "h", THINK_END, "x", USER, EOS)]
    assert stream(tokenizer, ids) == ["", "h", "</think>", "x", "<｜User｜>", "", ""]


def test_ids_without_a_token_yield_nothing(tokenizer):
    assert stream(tokenizer, [tokenizer.get_vocab_size() + 5, tokenizer.token_to_id("h")]) == ["", "h", ""]


@given(ids=st.lists(st.integers(0, 310), max_size=40))  # every id of the tokenizer, and some beyond
@settings(max_examples=300, deadline=None)
def test_pieces_join_to_the_librarys_decode(tokenizer, ids):
    assert "".join(stream(tokenizer, ids)) == tokenizer.decode(ids, skip_special_tokens=True)


@given(text=st.text(max_size=30))
@settings(deadline=None)
def test_text_comes_back(tokenizer, text):
    assert "".join(stream(tokenizer, encode(tokenizer, text))) == text


class LookupsOnly:
    """Stands for a tokenizer of which a stream may ask one token at a time and nothing else; counts the questions."""

    def __init__(self, tokenizer):
        self.get_added_tokens_decoder = tokenizer.get_added_tokens_decoder
        self.tokenizer, self.num_lookups = tokenizer, 0

    def id_to_token(self, token_id):
        self.num_lookups += 1
        return self.tokenizer.id_to_token(token_id)


def test_cost_per_token_does_not_grow(tokenizer):
    ids = encode(tokenizer, "hello 我们 " * 50)
    lookups = LookupsOnly(tokenizer)
    assert "".join(stream(lookups, ids)) == "hello 我们 " * 50
    assert lookups.num_lookups == len(ids)
