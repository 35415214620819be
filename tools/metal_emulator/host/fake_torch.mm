// What libtorch has on macOS only, for Linux: MPS's device, stream, allocator and hooks, and an mps device whose
// tensors lie in the fake Metal's buffers. Operators run on the CPU, on the same bytes.
#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/detail/MPSHooksInterface.h>
#include <ATen/mps/MPSStream.h>
#include <ATen/native/CPUFallback.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include "fake_metal.h"

namespace at::mps {

MPSDevice* MPSDevice::_device = nullptr;
MPSDevice::MPSDevice() : _mtl_device(MTLCreateSystemDefaultDevice()) {}
MPSDevice::~MPSDevice() = default;
MPSDevice* MPSDevice::getInstance() {
  static MPSDevice* device = _device = new MPSDevice;
  return device;
}
bool MPSDevice::isMacOS13Plus(MacOSVersion) const { return true; }
std::string MPSDevice::getName() const { return "emulated Apple GPU"; }
unsigned MPSDevice::getCoreCount() const { return 10; }
bool is_available() { return true; }
bool is_macos_13_or_newer(MacOSVersion) { return true; }

// As aten/src/ATen/mps/MPSStream.mm: one compute encoder stays open over many operators, synchronize commits.
MPSStream::MPSStream(Stream stream) : _stream(stream) {
  _commandQueue = [MPSDevice::getInstance()->device() newCommandQueue];
  _serialQueue = dispatch_queue_create("metal gpu stream", nullptr);
  fake::set_stream_queue(_serialQueue);
}
MPSStream::~MPSStream() = default;
MTLDevice_t MPSStream::device() const { return MPSDevice::getInstance()->device(); }
MPSCommandBuffer_t MPSStream::commandBuffer() {
  if (!_commandBuffer) _commandBuffer = [[MPSCommandBuffer commandBufferFromCommandQueue:_commandQueue] retain];
  return _commandBuffer;
}
MTLComputeCommandEncoder_t MPSStream::commandEncoder() {
  if (!fake::on_queue(_serialQueue)) fake::fail("MPSStream::commandEncoder outside of the stream's queue");
  if (!_commandEncoder) _commandEncoder = [[commandBuffer() computeCommandEncoder] retain];
  return _commandEncoder;
}
void MPSStream::endKernelCoalescing() {
  if (!_commandEncoder) return;
  [_commandEncoder endEncoding];
  [_commandEncoder release];
  _commandEncoder = nil;
}
void MPSStream::commit() { commitAndContinue(); }
void MPSStream::flush() { commitAndWait(); }
void MPSStream::commitAndContinue() { [commandBuffer() commitAndContinue]; }
void MPSStream::commitAndWait() {
  if (!_commandBuffer) return;
  MPSCommandBuffer_t buffer = _commandBuffer;
  _commandBuffer = nil;  // also when a kernel fails
  [buffer commit];
  [buffer waitUntilCompleted];
  [buffer release];
}
void MPSStream::synchronize(SyncType type) {
  endKernelCoalescing();
  if (type == SyncType::COMMIT_AND_WAIT)
    commitAndWait();
  else if (type == SyncType::COMMIT || type == SyncType::COMMIT_AND_CONTINUE)
    commitAndContinue();
}
void MPSStream::copy(MTLBuffer_t source, MTLBuffer_t target, size_t size, size_t source_offset, size_t target_offset,
                     uint64_t, SyncType type) {
  if (size == 0) return;
  dispatch_sync_with_rethrow(_serialQueue, ^() {
    @autoreleasepool {
      endKernelCoalescing();
      id<MTLBlitCommandEncoder> encoder = [commandBuffer() blitCommandEncoder];
      [encoder copyFromBuffer:source
                 sourceOffset:source_offset
                     toBuffer:target
            destinationOffset:target_offset
                         size:size];
      [encoder endEncoding];
      synchronize(type);
    }
  });
}

MPSStream* getDefaultMPSStream() {
  static MPSStream stream(Stream(Stream::UNSAFE, Device(DeviceType::MPS, 0), 0));
  return &stream;
}
MPSStream* getCurrentMPSStream() { return getDefaultMPSStream(); }

void dispatch_sync_with_rethrow(dispatch_queue_t queue, void (^block)()) {
  __block std::exception_ptr error;
  dispatch_sync(queue, ^{
    try {
      block();
    } catch (...) {
      error = std::current_exception();
    }
  });
  if (error) std::rethrow_exception(error);
}

static void wait_for_device() {
  MPSStream* stream = getDefaultMPSStream();
  if (fake::on_queue(stream->queue())) fake::fail("a wait for the device on the stream's own queue");
  dispatch_sync_with_rethrow(stream->queue(), ^() {
    @autoreleasepool {
      stream->synchronize(SyncType::COMMIT_AND_WAIT);
    }
  });
}

struct FakeAllocator : Allocator {
  static void release(void* buffer) { [(id)buffer release]; }
  DataPtr allocate(size_t size) override {
    void* buffer = [MPSDevice::getInstance()->device() newBufferWithLength:size options:MTLResourceStorageModeShared];
    return {buffer, buffer, release, Device(DeviceType::MPS, 0)};
  }
  DeleterFnPtr raw_deleter() const override { return release; }
  void copy_data(void*, const void*, size_t) const override { TORCH_CHECK(false, "copy_data"); }
};
Allocator* GetMPSAllocator() {
  static FakeAllocator allocator;
  return &allocator;
}

struct MPSHooks : MPSHooksInterface {
  MPSHooks() = default;
  MPSHooks(MPSHooksArgs) {}
  void init() const override {}
  bool hasMPS() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  Allocator* getMPSDeviceAllocator() const override { return GetMPSAllocator(); }
  void deviceSynchronize() const override { wait_for_device(); }
  void commitStream() const override { wait_for_device(); }
  void* getCommandBuffer() const override {
    getDefaultMPSStream()->endKernelCoalescing();
    return getDefaultMPSStream()->commandBuffer();
  }
  void* getDispatchQueue() const override { return getDefaultMPSStream()->queue(); }
};

}  // namespace at::mps

namespace at {
using mps::MPSHooks;  // the name under which torch looks it up
REGISTER_MPS_HOOKS(MPSHooks);
}  // namespace at

struct MPSGuard : c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::MPS> {
  c10::Device getDevice() const override { return {c10::DeviceType::MPS, 0}; }
  c10::Device exchangeDevice(c10::Device) const override { return getDevice(); }
  // Events have passed once they are recorded: the device is idle then.
  void record(void** event, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {
    at::mps::wait_for_device();
    *event = nullptr;
  }
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void synchronizeEvent(void*) const override {}
  void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}
};
C10_REGISTER_GUARD_IMPL(MPS, MPSGuard);

// ---- tensors
namespace {

using namespace at;

// The same bytes as a tensor of the CPU.
Tensor on_cpu(const Tensor& t) {
  if (!t.is_mps()) return t;
  const auto options = t.options().device(kCPU);
  if (t.numel() == 0) return at::empty_strided(t.sizes(), t.strides(), options);
  char* data = static_cast<char*>([(id<MTLBuffer>)t.storage().data() contents]);
  return from_blob(data + t.storage_offset() * t.element_size(), t.sizes(), t.strides(), [](void*) {}, options);
}

Tensor empty(IntArrayRef size, std::optional<ScalarType> dtype, std::optional<Layout>, std::optional<Device>,
             std::optional<bool>, std::optional<MemoryFormat> format) {
  return Tensor(at::detail::empty_generic(size, mps::GetMPSAllocator(), DispatchKeySet(DispatchKey::MPS),
                                          dtype_or_default(dtype), format));
}
Tensor empty_strided(IntArrayRef size, IntArrayRef stride, std::optional<ScalarType> dtype, std::optional<Layout>,
                     std::optional<Device>, std::optional<bool>) {
  return Tensor(at::detail::empty_strided_generic(size, stride, mps::GetMPSAllocator(),
                                                  DispatchKeySet(DispatchKey::MPS), dtype_or_default(dtype)));
}
Tensor& copy_(Tensor& self, const Tensor& source, bool) {
  mps::wait_for_device();
  on_cpu(self).copy_(on_cpu(source));
  return self;
}
Tensor copy_from(const Tensor& source, const Tensor& target, bool) {
  mps::wait_for_device();
  on_cpu(target).copy_(on_cpu(source));
  return target;
}
Tensor& set_source(Tensor& self, Storage storage, int64_t offset, IntArrayRef size, IntArrayRef stride) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(storage);
  impl->set_storage_offset(offset);
  impl->set_sizes_and_strides(size, stride);
  return self;
}
Tensor& set_tensor(Tensor& self, const Tensor& source) {
  return set_source(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}
Tensor copy_from_and_resize(const Tensor& source, const Tensor& target) {
  if (target.sizes() != source.sizes()) {
    Tensor result = target;
    set_tensor(result, empty(source.sizes(), target.scalar_type(), {}, {}, {}, {}));
  }
  return copy_from(source, target, false);
}
Tensor view(const Tensor& self, IntArrayRef size) { return at::native::view(self, size); }
Tensor as_strided(const Tensor& self, IntArrayRef size, IntArrayRef stride, std::optional<int64_t> offset) {
  return at::native::as_strided_tensorimpl(self, size, stride, offset);
}
Tensor reshape_alias(const Tensor& self, IntArrayRef size, IntArrayRef stride) {
  return at::native::as_strided_tensorimpl(self, size, stride, self.storage_offset());
}
// Composite in torch, but it asks for the device's best kernel. As on a Mac, this has no backward.
Tensor scaled_dot_product_attention(const Tensor& q, const Tensor& k, const Tensor& v,
                                    const std::optional<Tensor>& mask, double dropout, bool causal,
                                    std::optional<double> scale, bool gqa) {
  mps::wait_for_device();
  const auto cpu_mask = mask ? std::optional(on_cpu(*mask)) : std::nullopt;
  return at::scaled_dot_product_attention(on_cpu(q), on_cpu(k), on_cpu(v), cpu_mask, dropout, causal, scale, gqa)
      .to(q.device());
}
Scalar item(const Tensor& self) {
  mps::wait_for_device();
  return on_cpu(self).item();
}
Tensor& fill_(Tensor& self, const Scalar& value) {
  mps::wait_for_device();
  on_cpu(self).fill_(value);
  return self;
}
Tensor& zero_(Tensor& self) {
  mps::wait_for_device();
  on_cpu(self).zero_();
  return self;
}
void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  mps::wait_for_device();
  at::native::cpu_fallback(op, stack);
}

TORCH_LIBRARY_IMPL(_, MPS, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }
TORCH_LIBRARY_IMPL(aten, MPS, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("copy_", copy_);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("set_.source_Storage_storage_offset", set_source);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("view", view);
  m.impl("as_strided", as_strided);
  m.impl("_reshape_alias", reshape_alias);
  m.impl("scaled_dot_product_attention", scaled_dot_product_attention);
  m.impl("_local_scalar_dense", item);
  m.impl("fill_.Scalar", fill_);
  m.impl("zero_", zero_);
}

}  // namespace

// As an operator of torch leaves it behind.
extern "C" void fake_open_encoder() {
  auto* stream = at::mps::getDefaultMPSStream();
  at::mps::dispatch_sync_with_rethrow(stream->queue(), ^() {
    stream->commandEncoder();
  });
}

// Drops what is encoded and not yet run.
extern "C" void fake_reset_stream() {
  auto* stream = at::mps::getDefaultMPSStream();
  at::mps::dispatch_sync_with_rethrow(stream->queue(), ^() {
    @autoreleasepool {
      fake::drop_work = true;
      stream->synchronize(at::mps::SyncType::COMMIT_AND_WAIT);
      fake::drop_work = false;
    }
  });
}
