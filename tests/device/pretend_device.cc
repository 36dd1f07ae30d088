#include "tests/device/pretend_device.h"

#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include "server/base/check.h"
#include "tests/device/pretend_kernels.h"
#include "tests/device/pretend_memory.h"
#include "tests/device/pretend_stream.h"

namespace h3::testing {
namespace {

constexpr c10::DeviceType kType = c10::DeviceType::PrivateUse1;
const c10::Device kDevice(kType, 0);

struct Event {
  StreamMark mark;
};

class Guard final : public c10::impl::DeviceGuardImplInterface {
 public:
  c10::DeviceType type() const override { return kType; }
  c10::Device exchangeDevice(c10::Device device) const override {
    setDevice(device);
    return kDevice;
  }
  c10::Device getDevice() const override { return kDevice; }
  void setDevice(c10::Device device) const override {
    TORCH_CHECK(device.type() == kType && device.index() <= 0, "the pretend device has no ", device);
  }
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }

  c10::Stream getStream(c10::Device) const override { return StreamOf(CurrentStream()); }
  c10::Stream getDefaultStream(c10::Device) const override { return StreamOf(0); }
  c10::Stream getStreamFromGlobalPool(c10::Device, bool) const override { return StreamOf(NewStream()); }
  c10::Stream getNewStream(c10::Device, int) const override { return StreamOf(NewStream()); }
  c10::Stream exchangeStream(c10::Stream stream) const override { return StreamOf(ExchangeStream(stream.id())); }
  bool queryStream(const c10::Stream& stream) const override { return IsDone(MarkOf(stream.id())); }
  void synchronizeStream(const c10::Stream& stream) const override { Wait(MarkOf(stream.id())); }
  void synchronizeDevice(c10::DeviceIndex) const override { WaitForAll(/*counted=*/true); }

  void record(void** event, const c10::Stream& stream, c10::DeviceIndex, c10::EventFlag) const override {
    if (*event == nullptr) *event = new Event();
    static_cast<Event*>(*event)->mark = MarkOf(stream.id());
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event != nullptr) StreamWaits(stream.id(), static_cast<Event*>(event)->mark);
  }
  bool queryEvent(void* event) const override { return event == nullptr || IsDone(static_cast<Event*>(event)->mark); }
  void synchronizeEvent(void* event) const override {
    if (event != nullptr) Wait(static_cast<Event*>(event)->mark);
  }
  void destroyEvent(void* event, c10::DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override { GetPretendAllocator().recordStream(data, stream); }

 private:
  static c10::Stream StreamOf(c10::StreamId id) { return c10::Stream(c10::Stream::UNSAFE, kDevice, id); }
};

class Hooks final : public at::PrivateUse1HooksInterface {
 public:
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  void setCurrentDevice(c10::DeviceIndex) const override {}
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &GetPinnedAllocator(); }
  bool isPinnedPtr(const void* data) const override { return HoldPinned(data) != nullptr; }
  c10::Device getDeviceFromPtr(void*) const override { return kDevice; }
};

}  // namespace

void RegisterPretendDevice() {
  [[maybe_unused]] static const bool once = [] {
    c10::register_privateuse1_backend(kPretendDevice);
    const c10::impl::DeviceGuardImplRegistrar guard(kType, new Guard());
    c10::SetAllocator(kType, &GetPretendAllocator());
    at::RegisterPrivateUse1HooksInterface(new Hooks());
    RegisterPretendKernels();
    return true;
  }();
}

}  // namespace h3::testing
