// The kernel of every operator: the CPU's, on stand-ins for the tensors of the device.
//
// Arguments are lent to the CPU's kernel as tensors over the same bytes, and storages that it made
// are relabelled as the device's, so that nothing is copied.
#include "kernels.h"
#include "sim.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/List.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/CPUAllocator.h>

#include <algorithm>
#include <cstring>
#include <optional>

namespace sim {

namespace {

using c10::IValue;
using c10::StorageImpl;
using c10::TensorImpl;

const c10::DispatchKeySet kCpu(c10::DispatchKey::CPU);

c10::DispatchKeySet keys_like(const at::Tensor &tensor, c10::DispatchKeySet keys) {
    if (tensor.is_conj()) {
        keys = keys.add(c10::DispatchKey::Conjugate);
    }
    return tensor.is_neg() ? keys.add(c10::DispatchKey::Negative) : keys;
}

at::Tensor view_of(c10::Storage storage, const at::Tensor &like, c10::DispatchKeySet keys) {
    auto made = at::detail::make_tensor<TensorImpl>(std::move(storage), keys_like(like, keys),
                                                    like.dtype());
    TensorImpl *to = made.unsafeGetTensorImpl();
    to->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
    if (like.unsafeGetTensorImpl()->is_wrapped_number()) {
        to->set_wrapped_number(true);
    }
    return made;
}

c10::DataPtr relabelled(c10::DataPtr data, c10::Device device) {
    void *address = data.get();
    auto deleter = data.get_deleter();
    return {address, data.release_context(), deleter, device};
}

// The operands of one call, lent to a kernel of the CPU.
class Operands {
  public:
    Operands(int device, int stream, const char *name, bool are_read)
        : device_(device), stream_(stream), name_(name), are_read_(are_read) {}

    size_t bytes = 0;
    std::vector<std::vector<int64_t>> shapes;

    c10::Storage lend(const c10::Storage &storage, bool written) {
        StorageImpl *real = storage.unsafeGetStorageImpl();
        // What views are made of may be memory that nothing may read.
        const c10::DataPtr &data = are_read_ ? real->mutable_data_ptr() : real->_mutable_data_ptr_no_checks();
        note_access(data, device_, stream_, written, name_);
        for (auto &known : storages_) {
            if (known.real.get() == real) {
                return known.lent;
            }
        }
        void *address = data.get();
        auto lent = c10::make_intrusive<StorageImpl>(
            StorageImpl::use_byte_size_t(), real->nbytes(),
            c10::DataPtr(address, c10::Device(c10::kCPU)), cpu_allocator(), true);
        storages_.push_back({c10::intrusive_ptr<StorageImpl>::reclaim_copy(real),
                             c10::Storage(std::move(lent)), address});
        return storages_.back().lent;
    }

    at::Tensor lend(const at::Tensor &tensor, bool written) {
        for (auto &known : tensors_) {
            if (known.real.is_same(tensor)) {
                known.written |= written;
                return known.lent;
            }
        }
        shapes.push_back(tensor.sizes().vec());
        bytes += std::min<size_t>(tensor.nbytes(), tensor.storage().nbytes());
        at::Tensor lent = view_of(lend(tensor.storage(), written), tensor, kCpu);
        tensors_.push_back({tensor, lent, written});
        return lent;
    }

    // Carry over what the kernel did to operands: new sizes, new memory.
    void settle() {
        c10::Device device = device_at(device_);
        for (auto &known : storages_) {
            StorageImpl *lent = known.lent.unsafeGetStorageImpl();
            bool moved = lent->data_ptr().get() != known.address;
            if (moved && lent->nbytes() > 0) {
                known.real->set_data_ptr(relabelled(std::move(lent->mutable_data_ptr()), device));
            } else if (moved) {
                known.real->set_data_ptr(c10::DataPtr(nullptr, device));
            }
            if (lent->nbytes() != known.real->nbytes()) {
                known.real->set_nbytes(lent->nbytes());
            }
            known.address = known.real->_mutable_data_ptr_no_checks().get();
        }
        for (auto &known : tensors_) {
            if (!known.written) {
                continue;
            }
            TensorImpl *real = known.real.unsafeGetTensorImpl();
            c10::Storage storage = taken(known.lent.storage());
            if (storage.unsafeGetStorageImpl() != known.real.storage().unsafeGetStorageImpl()) {
                real->set_storage_keep_dtype(std::move(storage));
            }
            if (known.real.sizes() != known.lent.sizes() ||
                known.real.strides() != known.lent.strides() ||
                known.real.storage_offset() != known.lent.storage_offset()) {
                real->set_sizes_and_strides(known.lent.sizes(), known.lent.strides(),
                                            known.lent.storage_offset());
            }
        }
    }

    at::Tensor take(const at::Tensor &result) {
        if (!result.defined() || !result.is_cpu() || result.layout() != c10::kStrided) {
            return result;
        }
        for (auto &known : tensors_) {
            if (known.lent.is_same(result)) {
                return known.real;
            }
        }
        return view_of(taken(result.storage()), result,
                       c10::DispatchKeySet(c10::DispatchKey::PrivateUse1));
    }

  private:
    struct LentStorage {
        c10::intrusive_ptr<StorageImpl> real;
        c10::Storage lent;
        void *address;
    };
    struct LentTensor {
        at::Tensor real, lent;
        bool written;
    };

    int device_, stream_;
    const char *name_;
    bool are_read_;
    c10::SmallVector<LentStorage, 8> storages_;
    c10::SmallVector<LentTensor, 8> tensors_;

    // Return the device's storage for one that the kernel returned.
    c10::Storage taken(const c10::Storage &storage) {
        StorageImpl *found = storage.unsafeGetStorageImpl();
        for (auto &known : storages_) {
            if (known.lent.unsafeGetStorageImpl() == found) {
                return c10::Storage(known.real);
            }
        }
        c10::Device device = device_at(device_);
        size_t size = found->nbytes();
        c10::DataPtr data;
        if (found->data_ptr().get_deleter() == &deallocate) {
            data = relabelled(std::move(found->mutable_data_ptr()), device);
        } else {
            data = allocate(size, device_, device);
            if (size > 0) {
                std::memcpy(data.get(), found->data(), size);
            }
        }
        auto real = c10::make_intrusive<StorageImpl>(StorageImpl::use_byte_size_t(), size,
                                                     std::move(data), device_allocator(), true);
        note_access(real->data_ptr(), device_, stream_, true, name_);
        bytes += size;
        storages_.push_back({real, storage, real->mutable_data()});
        return c10::Storage(std::move(real));
    }
};

// Apply a function to the tensors of a value.
template <class Function> IValue mapped(const IValue &value, Function apply) {
    if (value.isTensor()) {
        return value.toTensor().defined() ? IValue(apply(value.toTensor())) : value;
    }
    if (value.isTensorList()) {
        c10::List<at::Tensor> list;
        for (const at::Tensor &tensor : value.toTensorList()) {
            list.push_back(tensor.defined() ? apply(tensor) : tensor);
        }
        return list;
    }
    if (value.isOptionalTensorList()) {
        c10::List<std::optional<at::Tensor>> list;
        for (std::optional<at::Tensor> tensor : value.toOptionalTensorList()) {
            list.push_back(tensor && tensor->defined() ? std::optional(apply(*tensor)) : tensor);
        }
        return list;
    }
    return value;
}

int device_among(c10::ArrayRef<IValue> values) {
    int found = -1;
    for (const IValue &value : values) {
        if (value.isDevice() && value.toDevice().type() == kType && value.toDevice().has_index()) {
            found = value.toDevice().index();
        }
        mapped(value, [&](const at::Tensor &tensor) {
            if (found < 0 && tensor.is_privateuseone()) {
                found = tensor.device().index();
            }
            return tensor;
        });
        if (found >= 0) {
            return found;
        }
    }
    return current_device();
}

// Kernels that are given no generator draw from the CPU's default one: it plays the device's.
class SwappedGenerators {
  public:
    explicit SwappedGenerators(int device)
        : host_(at::detail::getDefaultCPUGenerator()),
          inner_(inner_generator(default_generator(device))) {
        swap();
    }
    ~SwappedGenerators() { swap(); }
    SwappedGenerators(const SwappedGenerators &) = delete;

  private:
    at::Generator host_, inner_;

    void swap() {
        auto *a = host_.get<at::CPUGeneratorImpl>(), *b = inner_.get<at::CPUGeneratorImpl>();
        auto engine = a->engine();
        auto floats = a->next_float_normal_sample();
        auto doubles = a->next_double_normal_sample();
        a->set_engine(b->engine());
        a->set_next_float_normal_sample(b->next_float_normal_sample());
        a->set_next_double_normal_sample(b->next_double_normal_sample());
        b->set_engine(engine);
        b->set_next_float_normal_sample(floats);
        b->set_next_double_normal_sample(doubles);
    }
};

bool takes_cpu_tensors(const std::string &name) {
    return name == "aten::index" || name == "aten::_index_put_impl_" || name == "aten::set_" ||
           name == "aten::_unsafe_index";
}

// Operators that return their inputs' memory, or take other memory, run no kernel on a device.
bool is_view(const c10::FunctionSchema &schema) {
    const auto &returns = schema.returns();
    if (schema.name() == "aten::set_") {
        return true;
    }
    return !returns.empty() && std::all_of(returns.begin(), returns.end(), [](const c10::Argument &made) {
        return made.alias_info() && !made.alias_info()->isWrite();
    });
}

}  // namespace

void run_kernel(const c10::OperatorHandle &op, torch::jit::Stack *stack) {
    const auto &schema = op.schema();
    const auto &arguments = schema.arguments();
    const size_t first = stack->size() - arguments.size();
    int device = device_among(c10::ArrayRef<IValue>(*stack).slice(first));
    OnDevice on_device(device);
    int stream = current_stream(device);
    const char *name = schema.name().c_str();
    Operands operands(device, stream, name, !is_view(schema));
    launch(device, stream);

    bool draws = op.hasTag(at::Tag::nondeterministic_seeded);
    for (size_t i = 0; i < arguments.size(); i++) {
        IValue &value = (*stack)[first + i];
        const auto *alias = arguments[i].alias_info();
        bool written = alias && alias->isWrite();
        if (value.isDevice() && value.toDevice().type() == kType) {
            value = c10::Device(c10::kCPU);
        } else if (value.isStorage() && value.toStorage().device_type() == kType) {
            value = operands.lend(value.toStorage(), written);
        } else if (value.isGenerator()) {
            draws = false;
            if (value.toGenerator().device().type() == kType) {
                value = inner_generator(value.toGenerator());
            }
        } else if (value.isNone() && arguments[i].name() == "generator") {
            draws = false;
            value = inner_generator(default_generator(device));
        } else {
            value = mapped(value, [&](const at::Tensor &tensor) {
                bool is_lent = tensor.is_privateuseone() && tensor.device().index() == device;
                if (is_lent) {
                    return operands.lend(tensor, written);
                }
                bool is_allowed = tensor.is_cpu() && (tensor.dim() == 0 || takes_cpu_tensors(schema.name()));
                TORCH_CHECK(is_allowed || !(tensor.is_cpu() || tensor.is_privateuseone()),
                            "Expected all tensors to be on the same device, but found at least two "
                            "devices, ", device_at(device), " and ", tensor.device(),
                            "! (when checking arguments of ", name, ")");
                return tensor;
            });
        }
    }
    prepare_kernel(name, device, stream, operands.shapes);
    int64_t began_ns = wall_ns();
    {
        at::AutoDispatchBelowADInplaceOrView below;
        InKernel in_kernel(device);
        std::optional<SwappedGenerators> swapped;
        if (draws) {
            swapped.emplace(device);
        }
        op.redispatchBoxed(kCpu, stack);
    }
    int64_t took_ns = wall_ns() - began_ns;
    operands.settle();
    const size_t returns = schema.returns().size();
    for (size_t i = stack->size() - returns; i < stack->size(); i++) {
        (*stack)[i] = mapped((*stack)[i], [&](const at::Tensor &t) { return operands.take(t); });
    }
    finish(device, stream, wall_ns() - took_ns, is_view(schema) ? 0 : operands.bytes);
    if (op.hasTag(at::Tag::data_dependent_output) || op.hasTag(at::Tag::dynamic_output_shape)) {
        synchronize_stream(device, stream);
    }
}

}  // namespace sim
