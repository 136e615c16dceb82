"""README.md of a model, in particular for a base that is not on the Hub."""

from __future__ import annotations

import pytest
from huggingface_hub import ModelCard

from fedveil import paths
from fedveil.cards import hub_readme
from tests.fedveil.cards.made import card

PEFT = {"adapter_config.json"}


def test_the_bundled_base_is_no_id_of_the_hub_and_the_page_says_where_it_is(tmp_path):
    page = ModelCard(hub_readme.hub_page(card(tmp_path), PEFT))
    assert "base_model" not in page.data.to_dict()
    assert "base fedveil/tiny-text-generation, 2 rounds" in page.text
    location_text = 'in the folder `fedveil.paths.find_folder("assets/tiny-text-generation")`'
    assert location_text in page.text
    assert (paths.find_folder("assets/tiny-text-generation") / "config.json").is_file()


def test_a_base_that_is_drawn_is_had_by_merging(tmp_path):
    page = hub_readme.hub_page(card(tmp_path, **{"task.name": "image-classification"}), PEFT)
    assert "fedveil/tiny-image-classification is not on the Hub: FedVeil initializes it" in page
    assert "`fedveil merge RUN FOLDER`" in page


@pytest.mark.parametrize("model,files", [("tiny", {"config.json"}), ("owner/model", PEFT), ("/srv/bases/llama", PEFT)])
def test_other_pages_do_not_speak_of_it(model, files, tmp_path):
    assert "is not on the Hub" not in hub_readme.hub_page(card(tmp_path, **{"task.model": model}), files)
