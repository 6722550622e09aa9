"""Models whose weights accelerate keeps elsewhere: the tools say the same as of the model itself."""

import pytest
from merged import assert_same_numbers, llama

pytestmark = [pytest.mark.others, pytest.mark.filterwarnings("ignore")]


@pytest.mark.parametrize("where", ["cpu", "disk"])
def test_an_offloaded_model_has_its_own_numbers(where, tmp_path):
    import accelerate

    model = llama()
    if where == "cpu":
        accelerate.cpu_offload(model, execution_device="cpu")
    else:
        accelerate.disk_offload(model, str(tmp_path), execution_device="cpu")
    assert all(parameter.is_meta for parameter in model.parameters())
    assert_same_numbers(model, llama())
