import pytest

from servegym.experiments.live.fleet_file import ServerSpec, read_fleet

GOOD = """
[[server]]
name = "a"
engine = "llama.cpp"
model = "random:8x384"
slots = 4
cores = [0]

[[server]]
name = "b"
engine = "simulated"
profile = "h100-llama-3.1-8b"
options = {scheduler = "orca"}
"""


def test_a_fleet_is_read_with_its_defaults(tmp_path):
    (tmp_path / "fleet.toml").write_text(GOOD)
    assert read_fleet(tmp_path / "fleet.toml") == [
        ServerSpec("a", "llama.cpp", "random:8x384", slots=4, cores=(0,)),
        ServerSpec("b", "simulated", profile="h100-llama-3.1-8b", options={"scheduler": "orca"}),
    ]


def test_files_are_relative_to_the_fleet(tmp_path):
    (tmp_path / "one.gguf").write_text("")
    (tmp_path / "fleet.toml").write_text(GOOD.replace("random:8x384", "one.gguf"))
    assert read_fleet(tmp_path / "fleet.toml")[0].model == str(tmp_path / "one.gguf")


@pytest.mark.parametrize(
    ("old", "new", "field"),
    [
        ('"llama.cpp"', '"lama"', "engine"),
        ("slots = 4", "slots = 0", "slots"),
        ("slots = 4", "slots = '4'", "slots"),
        ("slots = 4", "slotz = 4", "slotz"),
        ("cores = [0]", "cores = [10000]", "cores"),
        ("cores = [0]", "port = 70000", "port"),
        ('name = "b"', 'name = "a"', "name"),
        ('name = "b"', 'name = "../b"', "name"),
        ('model = "random:8x384"', "", "model"),
        ('profile = "h100-llama-3.1-8b"', "", "profile"),
        ("[[server]]", "[[servers]]", "servers"),
        ("slots = 4", "slots = ", "TOML"),
    ],
)
def test_a_bad_fleet_is_refused_by_file_and_field(tmp_path, old, new, field):
    path = tmp_path / "fleet.toml"
    path.write_text(GOOD.replace(old, new))
    with pytest.raises(ValueError, match=f"fleet.toml: .*{field}"):
        read_fleet(path)


@pytest.mark.parametrize(("host", "shown"), [("10.0.0.1", "10.0.0.1"), ("::1", "[::1]")])
def test_an_address_is_a_url(host, shown):
    spec = ServerSpec("a", "simulated", host=host, profile="h100-llama-3.1-8b")
    assert spec.url(8001) == f"http://{shown}:8001/v1"
