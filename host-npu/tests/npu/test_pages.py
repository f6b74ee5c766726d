"""The code of the README runs as it stands."""

from tests._pages import ON_NPU, README, blocks


def test_the_code_of_the_readme_runs_as_it_stands(capsys):
    names: dict[str, object] = {"__name__": "page"}
    found = blocks(README, "python")
    assert len(found) > 2 and {title for title, _ in found} == {ON_NPU}
    for _, code in found:
        exec(compile(code, str(README), "exec"), names)
    assert "injected by a test" in capsys.readouterr().out
