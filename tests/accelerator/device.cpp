// What PyTorch asks of a device: guard, hooks, generators.
#include "sim.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/GeneratorForPrivateuseone.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/StorageImpl.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <cstring>
#include <mutex>

namespace sim {

namespace {

// The CPU's generator under the name of the device.
class Generator final : public c10::GeneratorImpl {
  public:
    explicit Generator(int device)
        : GeneratorImpl(device_at(device), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)),
          inner(at::make_generator<at::CPUGeneratorImpl>(c10::default_rng_seed_val)) {}

    void set_current_seed(uint64_t seed) override { inner.set_current_seed(seed); }
    uint64_t current_seed() const override { return inner.current_seed(); }
    uint64_t seed() override { return inner.seed(); }
    void set_offset(uint64_t offset) override { inner.set_offset(offset); }
    uint64_t get_offset() const override { return inner.get_offset(); }
    void set_state(const c10::TensorImpl &state) override {
        inner.unsafeGetGeneratorImpl()->set_state(state);
    }
    c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
        return inner.unsafeGetGeneratorImpl()->get_state();
    }

    at::Generator inner;

  private:
    Generator *clone_impl() const override {
        auto *copy = new Generator(device().index());
        copy->inner = inner.clone();
        return copy;
    }
};

at::Generator *make_generators() {
    auto *generators = new at::Generator[kDevices];
    for (int i = 0; i < kDevices; i++) {
        generators[i] = at::make_generator<Generator>(i);
    }
    return generators;
}

int index_of(c10::Device device) {
    return device.has_index() ? device.index() : current_device();
}

c10::Stream stream_of(int device, int stream) {
    return c10::Stream(c10::Stream::UNSAFE, device_at(device), stream);
}

class Guard final : public c10::impl::DeviceGuardImplInterface {
  public:
    c10::DeviceType type() const override { return kType; }
    c10::Device exchangeDevice(c10::Device device) const override {
        return device_at(exchange_device(device.index()));
    }
    c10::Device getDevice() const override { return device_at(current_device()); }
    void setDevice(c10::Device device) const override { exchange_device(index_of(device)); }
    void uncheckedSetDevice(c10::Device device) const noexcept override {
        exchange_device(index_of(device));
    }
    c10::DeviceIndex deviceCount() const noexcept override {
        return static_cast<c10::DeviceIndex>(device_count());
    }
    c10::DeviceCapability getDeviceCapability(c10::Device) const override { return {}; }

    c10::Stream getStream(c10::Device device) const override {
        return stream_of(index_of(device), current_stream(index_of(device)));
    }
    c10::Stream getDefaultStream(c10::Device device) const override {
        return stream_of(index_of(device), 0);
    }
    c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override {
        return getNewStream(device, 0);
    }
    c10::Stream getNewStream(c10::Device device, int) const override {
        return stream_of(index_of(device), new_stream(index_of(device)));
    }
    c10::Stream exchangeStream(c10::Stream stream) const override {
        int device = stream.device_index();
        return stream_of(device, exchange_stream(device, static_cast<int>(stream.id())));
    }
    bool queryStream(const c10::Stream &stream) const override {
        return stream_is_idle(stream.device_index(), static_cast<int>(stream.id()));
    }
    void synchronizeStream(const c10::Stream &stream) const override {
        synchronize_stream(stream.device_index(), static_cast<int>(stream.id()));
    }
    void synchronizeDevice(c10::DeviceIndex device) const override { synchronize_device(device); }
    void recordDataPtrOnStream(const c10::DataPtr &data, const c10::Stream &stream) const override {
        used_on_stream(data, static_cast<int>(stream.id()));
    }

    void record(void **event, const c10::Stream &stream, c10::DeviceIndex,
                c10::EventFlag) const override {
        Moment now = moment_now(stream.device_index(), static_cast<int>(stream.id()));
        if (*event) {
            *static_cast<Moment *>(*event) = now;
        } else {
            *event = new Moment(now);
        }
    }
    void block(void *event, const c10::Stream &stream) const override {
        if (event) {
            wait_on_stream(*static_cast<Moment *>(event), stream.device_index(),
                           static_cast<int>(stream.id()));
        }
    }
    bool queryEvent(void *event) const override {
        return !event || has_passed(*static_cast<Moment *>(event));
    }
    void synchronizeEvent(void *event) const override {
        if (event) {
            wait_on_host(*static_cast<Moment *>(event));
        }
    }
    void destroyEvent(void *event, c10::DeviceIndex) const noexcept override {
        delete static_cast<Moment *>(event);
    }
    double elapsedTime(void *begin, void *end, c10::DeviceIndex) const override {
        TORCH_CHECK(begin && end, "both events have to be recorded first");
        return elapsed_ms(*static_cast<Moment *>(begin), *static_cast<Moment *>(end));
    }
};

class Hooks final : public at::PrivateUse1HooksInterface {
  public:
    bool isBuilt() const override { return true; }
    bool isAvailable() const override { return device_count() > 0; }
    bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
    void init() const override {}
    c10::DeviceIndex deviceCount() const override {
        return static_cast<c10::DeviceIndex>(device_count());
    }
    void setCurrentDevice(c10::DeviceIndex device) const override { exchange_device(device); }
    c10::DeviceIndex getCurrentDevice() const override {
        return static_cast<c10::DeviceIndex>(current_device());
    }
    c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
        return static_cast<c10::DeviceIndex>(exchange_device(device));
    }
    c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override {
        return device < 0 ? getCurrentDevice() : exchangeDevice(device);
    }
    const at::Generator &getDefaultGenerator(c10::DeviceIndex device) const override {
        return default_generator(device < 0 ? current_device() : device);
    }
    at::Generator getNewGenerator(c10::DeviceIndex device) const override {
        return at::make_generator<Generator>(device < 0 ? current_device() : device);
    }
    c10::Device getDeviceFromPtr(void *address) const override {
        int device = device_of(address);
        TORCH_CHECK(device >= 0, "the address is not in memory of sim");
        return device_at(device);
    }
    bool isPinnedPtr(const void *address) const override { return is_pinned(address); }
    at::Allocator *getPinnedMemoryAllocator() const override { return pinned_allocator(); }
    void resizePrivateUse1Bytes(const c10::Storage &storage, size_t bytes) const override {
        int device = storage.device().index();
        c10::DataPtr fresh = allocate(bytes, device, device_at(device));
        if (size_t kept = std::min(bytes, storage.nbytes())) {
            launch(device, current_stream(device));
            std::memcpy(fresh.get(), storage.data(), kept);
        }
        storage.unsafeGetStorageImpl()->set_data_ptr(std::move(fresh));
        storage.unsafeGetStorageImpl()->set_nbytes(bytes);
    }
};

[[maybe_unused]] const bool has_hooks = [] {
    at::RegisterPrivateUse1HooksInterface(new Hooks);
    return true;
}();

}  // namespace

const at::Generator &default_generator(int device) {
    static at::Generator *generators = make_generators();
    return generators[device];
}

at::Generator inner_generator(const at::Generator &generator) {
    return static_cast<Generator *>(generator.unsafeGetGeneratorImpl())->inner;
}

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

}  // namespace sim

SIM_EXPORT void sim_manual_seed(int device, uint64_t seed) {
    at::Generator generator = sim::default_generator(device);
    std::lock_guard<std::mutex> lock(generator.mutex());
    generator.set_current_seed(seed);
}
