from pathlib import Path

import pytest

from h3kv.core.api_keys import hash_key, salt_of
from h3kv.core.errors import ApiKeyError, ConfigError
from services.gateway.tenants import Tenants, read_tenants

KEYS = ("h3-one", "h3-two", "h3-three")
FILE = f"""
tenants:
  - name: research
    keys: ["{hash_key(KEYS[0])}", "{hash_key(KEYS[1])}"]
    tokens_per_minute: 1000
    document_bytes: 2GiB
  - name: sales
    keys: ["{hash_key(KEYS[2])}", "{hash_key("test")}"]
"""


def written(folder: Path, text: str, *, mode: int = 0o600) -> Path:
    path = folder / "tenants.yaml"
    path.write_text(text, encoding="utf-8")
    path.chmod(mode)
    return path


def test_a_key_lets_its_tenant_in_with_its_quotas(tmp_path: Path) -> None:
    tenants = read_tenants(written(tmp_path, FILE))
    assert tenants.need_keys
    research = tenants.find(f"Bearer {KEYS[0]}")
    assert tenants.find(f"bearer  {KEYS[1]} ") == research
    assert (research.name, research.tokens_per_minute, research.document_bytes) == ("research", 1000, 2 << 30)
    sales = tenants.find(f"Bearer {KEYS[2]}")
    assert not sales.HasField("tokens_per_minute")
    assert not sales.HasField("document_bytes")
    assert research.salt == salt_of("research") != sales.salt
    assert len(sales.salt) == 32


@pytest.mark.parametrize(
    "shown",
    [
        None,
        "",
        "Bearer",
        "Bearer ",
        "Bearer h3-four",
        f"Basic {KEYS[0]}",
        KEYS[0],
        f"Bearer {hash_key(KEYS[0])}",
        "Bearer test",
        "Bearer \udcff",
    ],
)
def test_any_other_key_is_refused_without_being_repeated(tmp_path: Path, shown: str | None) -> None:
    tenants = read_tenants(written(tmp_path, FILE))
    with pytest.raises(ApiKeyError) as caught:
        tenants.find(shown)
    assert "four" not in str(caught.value)


def test_without_a_file_everybody_is_nobody_in_particular() -> None:
    tenants = read_tenants(None)
    assert not tenants.need_keys
    assert tenants == Tenants()
    assert tenants.find("Bearer whatever") == tenants.find(None)
    assert tenants.find(None).name == ""


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "the file: "),
        ("tenants: []", "at least 1"),
        ("tenants: [{name: a}]", "tenants.0.keys"),
        ("tenants: [{name: a, keys: []}]", "at least 1"),
        ("tenants: [{name: a, keys: [h3-secret]}]", "keys.0"),
        ("tenants: [{name: 'a b', keys: []}]", "tenants.0.name"),
        (f"tenants: [{{name: a, keys: ['{hash_key('k')}'], tokens: 3}}]", "tenants.0.tokens"),
        (f"tenants: [{{name: a, keys: ['{hash_key('k')}'], tokens_per_minute: 0}}]", "greater than or equal to 1"),
        (f"tenants: [{{name: a, keys: ['{hash_key('k')}', '{hash_key('k')}']}}]", "twice"),
        (f"tenants: [{{name: a, keys: ['{hash_key('k')}']}}]\ntenants: []", "one list of all tenants"),
        (f"tenants: [{{name: a, keys: ['{hash_key('k')}']}}, {{name: a, keys: ['{hash_key('j')}']}}]", "the name a"),
        ("tenants: [", "no valid YAML"),
    ],
)
def test_a_bad_file_is_refused_with_its_rule(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match="tenants_file") as caught:
        read_tenants(written(tmp_path, text))
    assert message in str(caught.value)


@pytest.mark.parametrize("mode", [0o620, 0o602, 0o666])
def test_a_file_that_others_can_write_is_refused(tmp_path: Path, mode: int) -> None:
    with pytest.raises(ConfigError, match="chmod go-w"):
        read_tenants(written(tmp_path, FILE, mode=mode))


def test_a_file_that_is_missing_or_no_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        read_tenants(tmp_path / "none.yaml")
    path = written(tmp_path, "")
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="no UTF-8 text"):
        read_tenants(path)
