// A device "cuda" in the host's memory, for a build of PyTorch without CUDA: tensors say that they are on cuda:0, and
// each operation runs on the CPU. What would make the host wait for a GPU is counted: each value that is read, each copy
// to the host, and each copy from the host that is not told to go on meanwhile.
#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <c10/core/impl/FakeGuardImpl.h>
#include <torch/library.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <set>
#include <string>

namespace c10::impl {
template <>
thread_local DeviceIndex FakeGuardImpl<DeviceType::CUDA>::current_device_ = 0;
template <>
thread_local std::array<StreamId, kFakeGuardImplMaxDevices> FakeGuardImpl<DeviceType::CUDA>::current_streams_ = {};
C10_REGISTER_GUARD_IMPL(CUDA, FakeGuardImpl<DeviceType::CUDA>);
}  // namespace c10::impl

namespace at {
struct CUDAHooks : public CUDAHooksInterface {
  CUDAHooks(CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isAvailable() const override { return true; }
  bool isBuilt() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return 1; }
  DeviceIndex getCurrentDevice() const override { return 0; }
  DeviceIndex current_device() const override { return 0; }
};
REGISTER_CUDA_HOOKS(CUDAHooks);
}  // namespace at

namespace {

std::mutex of_names;
std::set<std::string> ran, made;  // the names of operations, and of dtypes of tensors, so far
std::string listed;

std::atomic<long> reads{0}, downloads{0}, uploads{0}, operations{0};
std::atomic<int (*)(const char*)> observer{nullptr};
thread_local bool on_the_way = false;  // inside an operation, whose copies to the CPU and back are no one's

void count(std::atomic<long>& what, const char* name) {
  if (on_the_way) return;
  auto counts = observer.load();
  if (!counts || counts(name)) what++;
}

struct HostMemory final : c10::Allocator {
  static void release(void* pointer) { std::free(pointer); }
  c10::DataPtr allocate(size_t bytes) override {
    void* pointer = nullptr;
    if (bytes && posix_memalign(&pointer, 256, bytes)) throw std::bad_alloc();
    return {pointer, pointer, &release, c10::Device(c10::kCUDA, 0)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
};

HostMemory memory;
const auto on_cuda = c10::DispatchKeySet(c10::DispatchKey::CUDA);

// The same memory as a tensor on the CPU.
at::Tensor on_host(const at::Tensor& tensor) {
  if (!tensor.is_cuda()) return tensor;
  auto options = tensor.options().device(at::kCPU).requires_grad(false);
  return at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(), [tensor](void*) {}, options);
}

std::atomic<bool> without_float64{false};  // as on Apple's devices

c10::ScalarType kind(std::optional<at::ScalarType> type) {
  const auto found = c10::dtype_or_default(type);
  TORCH_CHECK(!without_float64 || found != at::kDouble, "this device has no float64");
  std::lock_guard<std::mutex> one(of_names);
  made.insert(c10::toString(found));
  return found;
}

at::Tensor empty(c10::SymIntArrayRef size, std::optional<at::ScalarType> type, std::optional<at::Layout>,
                 std::optional<at::Device>, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(size), &memory, on_cuda, kind(type), format);
}

at::Tensor empty_strided(c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<at::ScalarType> type,
                         std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), &memory,
                                           on_cuda, kind(type));
}

at::Tensor& copy_(at::Tensor& to, const at::Tensor& from, bool non_blocking) {
  if (to.is_cpu() && from.is_cuda()) count(downloads, "a copy to the host");
  if (to.is_cuda() && from.is_cpu() && !non_blocking) count(uploads, "a copy from the host");
  on_host(to).copy_(on_host(from).resolve_conj());
  return to;
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  at::Tensor target = to;
  copy_(target, from, non_blocking);
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  if (to.sizes() != from.sizes()) to.resize_(from.sizes());
  return copy_from(from, to, false);
}

const at::Tensor& resize_(const at::Tensor& tensor, c10::SymIntArrayRef size, std::optional<at::MemoryFormat>) {
  auto sizes = C10_AS_INTARRAYREF_SLOW(size);
  auto bytes = size_t(c10::multiply_integers(sizes) + tensor.storage_offset()) * tensor.itemsize();
  auto storage = tensor.storage();
  if (storage.nbytes() < bytes) {
    auto data = memory.allocate(bytes);
    if (storage.nbytes()) std::memcpy(data.get(), storage.data(), storage.nbytes());
    storage.set_data_ptr_noswap(std::move(data));
    storage.set_nbytes(bytes);
  }
  tensor.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
  return tensor;
}

at::Scalar value_of(const at::Tensor& tensor) {
  count(reads, "the value of a tensor");
  return on_host(tensor).item();
}

at::Tensor as_strided(const at::Tensor& tensor, c10::SymIntArrayRef size, c10::SymIntArrayRef stride,
                      std::optional<c10::SymInt> offset) {
  auto from = offset ? std::optional<int64_t>(offset->expect_int()) : std::nullopt;
  return at::native::as_strided_tensorimpl(tensor, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), from);
}

at::Tensor view(const at::Tensor& tensor, c10::SymIntArrayRef size) {
  return at::native::view(tensor, C10_AS_INTARRAYREF_SLOW(size));
}

at::Tensor reshape_alias(const at::Tensor& tensor, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  return at::native::_reshape_alias(tensor, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
}

at::Tensor unfold(const at::Tensor& tensor, int64_t dim, int64_t size, int64_t step) {
  return at::native::unfold(tensor, dim, size, step);
}

at::Tensor& set_(at::Tensor& tensor, at::Storage storage) {
  return at::native::set_storage_cpu_(tensor, storage, 0, {int64_t(storage.nbytes() / tensor.itemsize())}, {});
}

at::Tensor& set_storage(at::Tensor& tensor, at::Storage storage, c10::SymInt offset, c10::SymIntArrayRef size,
                        c10::SymIntArrayRef stride) {
  return at::native::set_storage_cpu_(tensor, storage, offset.expect_int(), C10_AS_INTARRAYREF_SLOW(size),
                                      C10_AS_INTARRAYREF_SLOW(stride));
}

// The size of what these give follows from values: on a GPU the host waits for it.
const std::set<std::string> sized_by_values{
    "aten::nonzero",      "aten::masked_select", "aten::_unique2",  "aten::unique_dim", "aten::unique_consecutive",
    "aten::repeat_interleave", "aten::bincount", "aten::equal", "aten::is_nonzero", "aten::histc"};

bool indexed_by_bools(const c10::OperatorHandle& op, const torch::jit::Stack& stack) {
  const auto& name = op.schema().name();
  if (name != "aten::index" && name != "aten::index_put_" && name != "aten::_index_put_impl_") return false;
  const auto count = op.schema().arguments().size();
  for (const at::IValue& each : stack[stack.size() - count + 1].toListRef())
    if (each.isTensor() && each.toTensor().defined() && each.toTensor().scalar_type() == at::kBool) return true;
  return false;
}

void on_the_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  operations++;
  const auto& name = op.schema().name();
  {
    std::lock_guard<std::mutex> one(of_names);
    ran.insert(c10::toString(op.operator_name()));
  }
  if (sized_by_values.count(name) || indexed_by_bools(op, *stack)) count(reads, name.c_str());
  const bool before = on_the_way;
  on_the_way = true;
  at::native::cpu_fallback(op, stack);
  on_the_way = before;
}

}  // namespace

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("copy_", &copy_);
  m.impl("_copy_from", &copy_from);
  m.impl("resize_", &resize_);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("_local_scalar_dense", &value_of);
  m.impl("as_strided", &as_strided);
  m.impl("view", &view);
  m.impl("_reshape_alias", &reshape_alias);
  m.impl("unfold", &unfold);
  m.impl("set_.source_Storage", &set_);
  m.impl("set_.source_Storage_storage_offset", &set_storage);
}
TORCH_LIBRARY_IMPL(aten, CPU, m) {
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("_copy_from", &copy_from);
}
TORCH_LIBRARY_IMPL(_, CUDA, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&on_the_cpu>()); }

extern "C" {
long count_of_reads() { return reads; }
long count_of_downloads() { return downloads; }
long count_of_uploads() { return uploads; }
long count_of_operations() { return operations; }
// The names of the operations, or of the dtypes, so far, one a line; then none.
const char* names(int dtypes) {
  std::lock_guard<std::mutex> one(of_names);
  auto& of = dtypes ? made : ran;
  listed.clear();
  for (const auto& name : of) listed += name + "\n";
  of.clear();
  return listed.c_str();
}
void refuse_float64(int refuse) { without_float64 = refuse; }
// What is asked, with a name, whenever the host would wait, whether that counts.
void observe(int (*counts)(const char*)) { observer = counts; }
}
