// A CUDA device that does nothing, for torch's CPU build. With it fake tensors on `cuda` go through
// autograd, which asks for a guard and streams. To be loaded before torch: LD_PRELOAD.
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

using namespace c10;
const Device kOnly(DeviceType::CUDA, 0);

struct Guard final : impl::NoOpDeviceGuardImpl<DeviceType::CUDA> {
  static Stream stream() { return Stream(Stream::DEFAULT, kOnly); }
  Device exchangeDevice(Device) const override { return kOnly; }
  Device getDevice() const override { return kOnly; }
  Stream getStream(Device) const noexcept override { return stream(); }
  Stream getDefaultStream(Device) const override { return stream(); }
  Stream exchangeStream(Stream) const noexcept override { return stream(); }
  void record(void**, const Stream&, const DeviceIndex, const EventFlag) const override {}
  void block(void*, const Stream&) const override {}
};
C10_REGISTER_GUARD_IMPL(CUDA, Guard)

namespace at {
struct CUDAHooks final : CUDAHooksInterface {  // torch looks for this name
  explicit CUDAHooks(CUDAHooksArgs) {}
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasCUDA() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return 1; }
  DeviceIndex getCurrentDevice() const override { return 0; }
};
REGISTER_CUDA_HOOKS(CUDAHooks)
}  // namespace at
