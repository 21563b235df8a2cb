// Operators of the device: memory, copies, attention, and the common kernel for the others.
#include "kernels.h"
#include "sim.h"

#include <ATen/EmptyTensor.h>
#include <ATen/native/DispatchStub.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <optional>

namespace sim {

namespace {

const c10::DispatchKeySet kCpu(c10::DispatchKey::CPU);
const c10::DispatchKeySet kSim(c10::DispatchKey::PrivateUse1);

int index_of(std::optional<c10::Device> device) {
    return device && device->has_index() ? device->index() : current_device();
}

at::Tensor empty(c10::SymIntArrayRef size, std::optional<c10::ScalarType> dtype,
                 std::optional<c10::Layout>, std::optional<c10::Device> device,
                 std::optional<bool>, std::optional<c10::MemoryFormat> format) {
    OnDevice on_device(index_of(device));
    return at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(size), device_allocator(), kSim,
                                     c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(c10::SymIntArrayRef size, c10::SymIntArrayRef stride,
                         std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>,
                         std::optional<c10::Device> device, std::optional<bool>) {
    OnDevice on_device(index_of(device));
    return at::detail::empty_strided_generic(
        C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), device_allocator(), kSim,
        c10::dtype_or_default(dtype));
}

bool has_plain_bytes(const at::Tensor &tensor) {
    return tensor.is_non_overlapping_and_dense() && !tensor.is_conj() && !tensor.is_neg();
}

bool is_same_layout(const at::Tensor &a, const at::Tensor &b) {
    return a.dtype() == b.dtype() && a.sizes() == b.sizes() && a.strides() == b.strides() &&
           has_plain_bytes(a) && has_plain_bytes(b);
}

void copy_over_link(const at::Tensor &from, const at::Tensor &to, bool non_blocking) {
    bool uploads = to.is_privateuseone();
    const at::Tensor &near = uploads ? to : from;
    const at::Tensor &host = uploads ? from : to;
    int device = near.device().index(), stream = current_stream(device);
    bool waits = !(non_blocking && is_pinned(host.const_data_ptr()));
    transfer(device, stream, uploads ? Direction::to_device : Direction::to_host,
             to.mutable_data_ptr(), from.const_data_ptr(), to.nbytes(), host.storage(), waits);
    note_access(near.storage().data_ptr(), device, stream, uploads, "a copy");
}

at::Tensor copy_from(const at::Tensor &source, const at::Tensor &to, bool non_blocking) {
    if (to.numel() == 0) {
        return to;
    }
    at::Tensor from = source.sizes() == to.sizes() ? source : source.expand_as(to);
    TORCH_CHECK((from.is_cpu() || from.is_privateuseone()) && (to.is_cpu() || to.is_privateuseone()),
                "sim has no copies from ", from.device(), " to ", to.device());
    if (from.is_privateuseone() && to.is_privateuseone() && from.device() == to.device()) {
        static auto copy = c10::Dispatcher::singleton().findSchemaOrThrow("aten::copy_", "");
        torch::jit::Stack stack{to, from, non_blocking};
        run_kernel(copy, &stack);
    } else if (from.is_privateuseone() && to.is_privateuseone()) {
        to.copy_(from.to(c10::kCPU));
    } else if (is_same_layout(from, to)) {
        copy_over_link(from, to, non_blocking);
    } else {
        // Plain bytes cross the link; layout and type are changed on either side of it.
        at::Tensor packed = from.resolve_conj().resolve_neg().contiguous();
        at::Tensor landed = at::empty(packed.sizes(), packed.options().device(to.device()));
        copy_over_link(packed, landed, non_blocking && to.is_privateuseone());
        to.copy_(landed);
    }
    return to;
}

at::Tensor copy_from_and_resize(const at::Tensor &from, const at::Tensor &to) {
    const_cast<at::Tensor &>(to).resize_(from.sizes());
    return copy_from(from, to, false);
}

void record_stream(at::Tensor &tensor, c10::Stream stream) {
    used_on_stream(tensor.storage().data_ptr(), static_cast<int>(stream.id()));
}

// Module.to() keeps its Parameters, as between the CPU and CUDA.
bool is_shallow_copy_type(const at::Tensor &a, const at::Tensor &b) {
    for (const at::Tensor *tensor : {&a, &b}) {
        bool known = tensor->is_cpu() || tensor->is_privateuseone();
        if (!known || tensor->layout() != c10::kStrided) {
            return false;
        }
    }
    return true;
}

// The attention that the CPU would choose, by metadata alone: fake tensors are asked about too.
int64_t choose_attention(const at::Tensor &query, const at::Tensor &key, const at::Tensor &value,
                         const std::optional<at::Tensor> &mask, double dropout, bool is_causal,
                         std::optional<double> scale, bool grouped) {
    auto outline = [](const at::Tensor &tensor) {
        c10::Storage nothing(c10::Storage::use_byte_size_t(), 0, c10::DataPtr(nullptr, c10::kCPU));
        auto made = at::detail::make_tensor<c10::TensorImpl>(std::move(nothing), kCpu,
                                                             tensor.dtype());
        made.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides());
        made.set_requires_grad(tensor.requires_grad());
        return made;
    };
    for (const at::Tensor *tensor : {&query, &key, &value}) {
        if (tensor->unsafeGetTensorImpl()->has_symbolic_sizes_strides()) {
            return 0;
        }
    }
    using Choose = int64_t(const at::Tensor &, const at::Tensor &, const at::Tensor &,
                           const std::optional<at::Tensor> &, double, bool, std::optional<double>,
                           bool);
    static auto choose = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("aten::_fused_sdp_choice", "")
                             .typed<Choose>();
    c10::impl::ExcludeDispatchKeyGuard no_python(c10::DispatchKeySet(
        {c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot}));
    c10::impl::ExcludeDispatchKeyGuard no_autograd(c10::autograd_dispatch_keyset);
    std::optional<at::Tensor> outlined;
    if (mask && mask->defined()) {
        outlined = outline(*mask);
    }
    return choose.redispatch(kCpu, outline(query), outline(key), outline(value), outlined, dropout,
                             is_causal, scale, grouped);
}

// Operators with a kernel for the CPU and one for any device would run the latter here, whose
// results differ from the CPU's by rounding.
void register_common_kernel() {
    auto *library = new torch::Library(torch::Library::IMPL, "aten", c10::DispatchKey::PrivateUse1,
                                       __FILE__, __LINE__);
    auto &dispatcher = c10::Dispatcher::singleton();
    constexpr auto prefix = std::string_view("aten::");
    for (const c10::OperatorName &name : dispatcher.getAllOpNames()) {
        auto op = dispatcher.findOp(name);
        if (name.name.rfind(prefix, 0) != 0 || !op ||
            op->hasKernelForDispatchKey(c10::DispatchKey::PrivateUse1)) {
            continue;
        }
        bool any_device =
            op->hasKernelForDispatchKey(c10::DispatchKey::CompositeExplicitAutograd) ||
            op->hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd) ||
            op->hasKernelForDispatchKey(c10::DispatchKey::CompositeExplicitAutogradNonFunctional);
        bool both = any_device && op->hasKernelForDispatchKey(c10::DispatchKey::CPU);
        if (!both && name.name != "aten::convolution" && name.name != "aten::convolution_backward") {
            continue;
        }
        std::string full = name.name.substr(prefix.size());
        if (!name.overload_name.empty()) {
            full += "." + name.overload_name;
        }
        library->impl(full.c_str(), torch::CppFunction::makeFromBoxedFunction<&run_kernel>());
    }
}

}  // namespace

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
    library.fallback(torch::CppFunction::makeFromBoxedFunction<&run_kernel>());
}

TORCH_LIBRARY(sim, library) {
    library.def("default_generator(int device) -> Generator?", [](int64_t device) {
        return std::optional<at::Generator>(default_generator(static_cast<int>(device)));
    });
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
    library.impl("empty.memory_format", &empty);
    library.impl("empty_strided", &empty_strided);
    library.impl("_copy_from", &copy_from);
    library.impl("_copy_from_and_resize", &copy_from_and_resize);
    library.impl("record_stream", &record_stream);
    library.impl("_has_compatible_shallow_copy_type", &is_shallow_copy_type);
    library.impl("_fused_sdp_choice", &choose_attention);
}

// Without these, a copy of a lazily conjugated view would clone it, which is a copy, without end.
TORCH_LIBRARY_IMPL(aten, Conjugate, library) {
    library.impl("_copy_from", torch::CppFunction::makeFallthrough());
}
TORCH_LIBRARY_IMPL(aten, Negative, library) {
    library.impl("_copy_from", torch::CppFunction::makeFallthrough());
}

}  // namespace sim

namespace at::native {
REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &sim::choose_attention)
}  // namespace at::native

SIM_EXPORT void sim_initialize() {
    sim::install_cpu_allocator();
    sim::register_common_kernel();
}
