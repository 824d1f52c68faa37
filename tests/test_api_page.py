"""The public API renders as a page that a person can read (`make api`)."""

import re

import pdoc
import pytest

import agentrl


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    folder = tmp_path_factory.mktemp("api")
    pdoc.render.configure(docformat="google")
    pdoc.pdoc("agentrl", r"!agentrl\..+", output_directory=folder)
    return (folder / "agentrl.html").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", agentrl.__all__)
def test_every_public_name_has_an_entry_with_a_docstring(page, name):
    entry = page[page.index(f'<section id="{name}">') :]
    entry = entry[: entry.index("</section>")]
    (docstring,) = re.findall(r'<div class="docstring">(.*?)</div>', entry, re.DOTALL)[:1]
    assert len(re.sub(r"<[^>]+>", "", docstring).strip()) > 20


@pytest.mark.parametrize("name", ["Env.reset", "Env.step", "reward"])
def test_what_users_write_lists_arguments_and_results(page, name):
    entry = page[page.index(f'<div id="{name}"' if "." in name else f'<section id="{name}">') :]
    entry = entry[: entry.index("</section>") if "." not in name else 20_000]
    assert "Arguments" in entry
    assert "Returns" in entry
