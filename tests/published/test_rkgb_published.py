"""rk-GB's README and test notebook, as calls: the names and their use are those published."""

from __future__ import annotations

import shutil

import pytest
import torch
from rotor.models import gpt, resnet18
from torch import nn
from zoo.models import Function

from rotor import rkgb
from rotor.rkgb import partitioned


def test_the_example(tmp_path):
    device = torch.device("cpu")
    model = gpt.gpt("tiny", layers=3, width=16, heads=2, vocab_size=54, dropout=0.1)
    model.to(device)
    sample = torch.randint(54, (10, 20), device=device)
    rkgb_result = rkgb.make_all_graphs(model, sample)
    rkgb.print_all_graphs(rkgb_result, name=str(tmp_path / "GPT2_3"), render_format="dot")
    assert (tmp_path / "GPT2_3_S_graph.dot").exists()
    assert [len(members) for members in rkgb_result.equivalent_classes] == [1, 1, 3, 3, 1, 1]


def test_the_example_in_pdf(tmp_path):
    pytest.importorskip("graphviz")
    if shutil.which("dot") is None:
        pytest.skip("needs Graphviz's program dot")
    rkgb_result = rkgb.make_all_graphs(nn.Linear(4, 4), torch.randn(2, 4))
    paths = rkgb.print_all_graphs(rkgb_result, name=str(tmp_path / "linear"), render_format="pdf")
    assert len(paths) == 5
    assert all(path.read_bytes().startswith(b"%PDF") for path in paths)


def test_the_notebook(capsys):
    sample = torch.randn((2, 3, 32, 32), requires_grad=True)
    result = rkgb.test_rkgb(resnet18(num_classes=10), sample)
    assert "classes" in capsys.readouterr().out
    assert result.K_graph.input_kdn_grad is not None


@pytest.mark.filterwarnings("ignore:enable_nested_tensor")
def test_lists_of_inputs(capsys):
    module = nn.Transformer(d_model=8, nhead=2, num_encoder_layers=1, num_decoder_layers=1)
    inputs = [torch.rand((5, 2, 8)), torch.rand((4, 2, 8))]
    result = rkgb.test_rkgb(module, inputs)
    assert result.D_graph.inputs == ["src", "tgt"]
    assert "K_graph" in capsys.readouterr().out


def test_attributes():
    result = rkgb.make_all_graphs(
        nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)),
        torch.randn(2, 4),
        {},
        verbose=False,
        impose_device=True,
        bool_kg=True,
        bool_list_kg=True,
        check_device_is_gpu=False,
    )
    assert all(node.get_code() for node in result.B_graph.nodes if not node.is_input)
    assert all(not node.deps_rand for node in result.B_graph.nodes)
    sg = result.S_graph
    assert sg.output_node is sg.nodes[-1]
    assert sg.hidden_output == sg.output_node.main_target
    assert sg.direct_inputs == ["input"]
    node = sg.nodes[-1]
    assert node.main_fct == "torch.ops.aten.addmm.default"
    assert node.get_code() == node.full_code()
    assert not node.is_artefact
    assert not node.is_rand
    assert node.protected
    assert [len(names) for names in node.deps.values()] == [1]
    kg = result.K_graph
    fwd = kg.dict_kn[f"fwd_{node.main_target}"]
    bwd = kg.dict_kn[f"bwd_{node.main_target}"]
    assert fwd.is_fwd
    assert not bwd.is_fwd
    assert fwd.get_code() == node.get_code()
    assert fwd.time > 0
    assert fwd.overhead >= 0
    assert kg.loss_kcn in kg.list_kcn
    data = kg.dict_kn[f"{node.main_target} data"]
    assert data is kg.output_kdn_data
    assert data.mem == 16
    assert data.info.tsize == (2, 2)
    assert data.deps == {fwd}
    assert kg.loss_kcn in data.users_real
    assert data.users_fake == set()
    assert kg.output_kdn_grad.users_real >= {bwd}
    assert len(result.S_graph_list) == len(result.K_graph_list) == 2
    assert result.equivalent_classes == [[0], [1]]
    assert result.list_ano_S[0] != result.list_ano_S[1]


# -- rk-GB 2


def test_a_result_is_made_from_a_model_and_its_inputs():
    model, sample = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)), torch.randn(2, 4)
    result = rkgb.Result(model, [sample], wanted_graphs={"F", "FB"})
    made = rkgb.make_all_graphs(model, sample)
    assert isinstance(made, rkgb.Result)
    assert len(result.F) == len(made.F)
    assert result.forward_and_backward_graph is result.FB
    assert len(result.FB) == len(made.FB)
    assert result.R is result.S is result.P is result.raw_graph is None
    assert made.Pc is made.P
    assert made.simplified_graph is made.S
    assert len(result.K_graph.list_kcn) == len(made.K_graph.list_kcn)
    with pytest.raises(ValueError, match="wanted_graphs has 'K', expected some of F, FB, H, P"):
        rkgb.Result(model, sample, wanted_graphs={"F", "K"})


def test_graphs_without_a_counterpart_say_what_to_use():
    made = rkgb.Result(nn.Linear(4, 4), torch.randn(2, 4))
    for name in ("H", "Hs", "Hc", "hierarchical_structure", "Ps", "partitioned_structure"):
        with pytest.raises(AttributeError, match=f"no counterpart of rk-GB's {name}: P .*K_graph"):
            getattr(made, name)
    with pytest.raises(AttributeError, match="Result has no attribute 'Q'"):
        made.Q  # noqa: B018


def wide():
    def forward(self, x):
        y = self.first(x)
        return self.second(y) * torch.tanh(y)

    return Function(forward, first=nn.Linear(4, 4), second=nn.Linear(4, 4))


def test_partitioners_by_their_published_names():
    model, sample = nn.Sequential(wide(), wide()), torch.randn(2, 4)
    cut = rkgb.Result(model, sample, partitioners=[partitioned.PartitionerSequence()])
    flat = rkgb.Result(model, sample, partitioners=[partitioned.Partitioner()])
    assert len(cut.P) == len(rkgb.make_all_graphs(model, sample).P)
    assert len(flat.P) == len(flat.K_graph.list_kcn) > len(cut.P)
    for name in ("BottomToTop", "RecognizeRepetitivePattern", "Dagp"):
        with pytest.raises(NotImplementedError, match=f"Partitioner{name}: PartitionerSequence"):
            getattr(partitioned, f"Partitioner{name}")(max_len_seq=99)
    with pytest.raises(TypeError, match="'sequence' is no partitioner"):
        rkgb.Result(model, sample, partitioners=["sequence"])
