// The boxed kernel of every operator.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

namespace sim {

void run_kernel(const c10::OperatorHandle &op, torch::jit::Stack *stack);

}  // namespace sim
