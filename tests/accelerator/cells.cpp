// Cells of LSTM and GRU, which PyTorch asks of a device as one kernel each.
#include "sim.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/sigmoid_backward.h>
#include <ATen/ops/tanh_backward.h>
#include <ATen/ops/zeros_like.h>
#include <torch/library.h>

#include <optional>
#include <tuple>

namespace sim {

namespace {

using at::Tensor;
using MaybeTensor = std::optional<Tensor>;

Tensor biased(const Tensor &gates, const MaybeTensor &bias) {
    return bias && bias->defined() ? gates + *bias : gates;
}

std::tuple<Tensor, Tensor, Tensor> lstm_cell(const Tensor &input_gates, const Tensor &hidden_gates,
                                             const Tensor &cell, const MaybeTensor &input_bias,
                                             const MaybeTensor &hidden_bias) {
    Tensor gates = biased(input_gates, input_bias) + biased(hidden_gates, hidden_bias);
    auto parts = gates.chunk(4, 1);
    Tensor in = parts[0].sigmoid(), forget = parts[1].sigmoid();
    Tensor candidate = parts[2].tanh(), out = parts[3].sigmoid();
    Tensor next = forget * cell + in * candidate;
    return {out * next.tanh(), next, at::cat({in, forget, candidate, out}, 1)};
}

std::tuple<Tensor, Tensor, Tensor> lstm_cell_backward(const MaybeTensor &grad_hidden,
                                                      const MaybeTensor &grad_next,
                                                      const Tensor &cell, const Tensor &next,
                                                      const Tensor &workspace, bool has_bias) {
    auto parts = workspace.chunk(4, 1);
    const Tensor &in = parts[0], &forget = parts[1], &candidate = parts[2], &out = parts[3];
    Tensor bent = next.tanh();
    Tensor grad_out = at::zeros_like(bent), grad_cell = at::zeros_like(bent);
    if (grad_hidden && grad_hidden->defined()) {
        grad_out = *grad_hidden * bent;
        grad_cell = at::tanh_backward(*grad_hidden * out, bent);
    }
    if (grad_next && grad_next->defined()) {
        grad_cell = grad_cell + *grad_next;
    }
    Tensor grad_gates = at::cat({at::sigmoid_backward(grad_cell * candidate, in),
                                 at::sigmoid_backward(grad_cell * cell, forget),
                                 at::tanh_backward(grad_cell * in, candidate),
                                 at::sigmoid_backward(grad_out, out)}, 1);
    Tensor grad_bias = has_bias ? grad_gates.sum(0) : Tensor();
    return {grad_gates, grad_cell * forget, grad_bias};
}

std::tuple<Tensor, Tensor> gru_cell(const Tensor &input_gates, const Tensor &hidden_gates,
                                    const Tensor &hidden, const MaybeTensor &input_bias,
                                    const MaybeTensor &hidden_bias) {
    auto ins = biased(input_gates, input_bias).chunk(3, 1);
    auto hiddens = biased(hidden_gates, hidden_bias).chunk(3, 1);
    Tensor reset = (ins[0] + hiddens[0]).sigmoid(), update = (ins[1] + hiddens[1]).sigmoid();
    Tensor candidate = (ins[2] + reset * hiddens[2]).tanh();
    Tensor next = candidate + update * (hidden - candidate);
    return {next, at::cat({reset, update, candidate, hidden, hiddens[2]}, 1)};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> gru_cell_backward(const Tensor &grad,
                                                                     const Tensor &workspace,
                                                                     bool has_bias) {
    auto parts = workspace.chunk(5, 1);
    const Tensor &reset = parts[0], &update = parts[1], &candidate = parts[2];
    const Tensor &hidden = parts[3], &hidden_candidate = parts[4];
    Tensor grad_update = at::sigmoid_backward(grad * (hidden - candidate), update);
    Tensor grad_candidate = at::tanh_backward(grad * (1 - update), candidate);
    Tensor grad_reset = at::sigmoid_backward(grad_candidate * hidden_candidate, reset);
    Tensor grad_input = at::cat({grad_reset, grad_update, grad_candidate}, 1);
    Tensor grad_gates = at::cat({grad_reset, grad_update, grad_candidate * reset}, 1);
    Tensor input_bias = has_bias ? grad_input.sum(0) : Tensor();
    Tensor hidden_bias = has_bias ? grad_gates.sum(0) : Tensor();
    return {grad_input, grad_gates, grad * update, input_bias, hidden_bias};
}

}  // namespace

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
    library.impl("_thnn_fused_lstm_cell", &lstm_cell);
    library.impl("_thnn_fused_lstm_cell_backward_impl", &lstm_cell_backward);
    library.impl("_thnn_fused_gru_cell", &gru_cell);
    library.impl("_thnn_fused_gru_cell_backward", &gru_cell_backward);
}

}  // namespace sim
