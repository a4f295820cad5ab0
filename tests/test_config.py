import pytest

from hf_longmoe import DispatchConfig, LongMoEConfig, VocabConfig
from hf_longmoe.sizes import format_bytes, parse_bytes


@pytest.mark.parametrize(
    ("text", "number"),
    [("64MiB", 64 << 20), ("1.5 gib", 3 << 29), (4096, 4096), ("2KB", 2000), ("7", 7), (" .5 MiB ", 1 << 19)],
)
def test_sizes_as_people_write_them(text, number):
    assert parse_bytes(text) == number


@pytest.mark.parametrize("bad", ["64 parsecs", "", "MiB", "-1", 0, -5, "0GiB", 1.5, True, None, "1e3"])
def test_bad_sizes_name_the_argument(bad):
    with pytest.raises(ValueError, match=r"^dispatch\.budget=.*64MiB"):
        DispatchConfig(budget=bad)


@pytest.mark.parametrize(
    ("number", "text"), [(1023, "1023 B"), (1536, "1.5 KiB"), (100 << 20, "100 MiB"), (1 << 50, "1024 TiB")]
)
def test_sizes_for_people(number, text):
    assert format_bytes(number) == text


def test_frozen():
    config = LongMoEConfig()
    with pytest.raises(AttributeError):
        config.dispatch.budget = 1
    with pytest.raises(AttributeError):
        config.vocab = None


def test_argument_wins_over_environment_wins_over_default(monkeypatch):
    assert DispatchConfig().budget == 256 << 20
    monkeypatch.setenv("LONGMOE_DISPATCH_BUDGET", "32MiB")
    monkeypatch.setenv("LONGMOE_VOCAB_Z_LOSS", "1e-4")
    assert LongMoEConfig().dispatch.budget == 32 << 20
    assert LongMoEConfig().vocab.z_loss == 1e-4
    assert DispatchConfig(budget="8MiB").budget == 8 << 20
    monkeypatch.setenv("LONGMOE_DISPATCH_BUDGET", "lots")
    with pytest.raises(ValueError, match=r"dispatch\.budget='lots'"):
        LongMoEConfig()


def test_dict_and_yaml_round_trip(tmp_path):
    config = LongMoEConfig(dispatch=None, vocab=VocabConfig(budget="12MiB", label_smoothing=0.1))
    assert LongMoEConfig.from_dict(config.to_dict()) == config
    config.to_yaml(tmp_path / "caps.yaml")
    assert LongMoEConfig.from_yaml(tmp_path / "caps.yaml") == config
    (tmp_path / "caps.yaml").write_text("dispatch: {budget: 64MiB}\n")
    assert LongMoEConfig.from_yaml(tmp_path / "caps.yaml").dispatch.budget == 64 << 20
    (tmp_path / "caps.yaml").write_text("")
    assert LongMoEConfig.from_yaml(tmp_path / "caps.yaml") == LongMoEConfig()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("dispach: {}", "Did you mean 'dispatch'"),
        ("vocab: {buget: 1MiB}", "Unknown key 'buget' in vocab. Did you mean 'budget'"),
        ("vocab: 64MiB", "must be a mapping"),
        ("- a list", "must be a mapping"),
        ("vocab: {schedule: tile}", "Did you mean 'tiles'"),
        ("vocab: {label_smoothing: 1.0}", "label_smoothing"),
        ("vocab: {z_loss: hot}", "z_loss"),
        ("a: [", "caps.yaml"),
        ("!!python/object/apply:os.getcwd []", "caps.yaml"),
    ],
)
def test_bad_yaml_is_a_one_line_error_that_names_the_file(tmp_path, text, message):
    (tmp_path / "caps.yaml").write_text(text)
    with pytest.raises(ValueError) as caught:
        LongMoEConfig.from_yaml(tmp_path / "caps.yaml")
    assert message in str(caught.value) and "caps.yaml" in str(caught.value) and "\n" not in str(caught.value)


def test_a_part_of_the_wrong_type():
    with pytest.raises(ValueError, match="dispatch='64MiB' must be a DispatchConfig or None"):
        LongMoEConfig(dispatch="64MiB")
