// io_uring by its system calls alone.
//
//   submission queue            completion queue
//   [ head ... tail )  we add   [ head ... tail )  the kernel adds
//     ^ the kernel               ^ we
#include <linux/io_uring.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "h3/io_kernel.hpp"

namespace h3::io {
namespace {

// Newer than the oldest header that we build with.
constexpr std::uint32_t kSetupSubmitAll = 1u << 7;      // Linux 5.18
constexpr std::uint32_t kSetupCoopTaskrun = 1u << 8;    // 5.19
constexpr std::uint32_t kSetupSingleIssuer = 1u << 12;  // 6.0
constexpr std::uint32_t kSetupDeferTaskrun = 1u << 13;  // 6.1

// The best first: completions are handled when we ask for them, not by interrupting us.
constexpr std::uint32_t kFlagSets[] = {kSetupSubmitAll | kSetupSingleIssuer | kSetupDeferTaskrun,
                                       kSetupSubmitAll | kSetupCoopTaskrun, 0};
constexpr std::uint32_t kFeatures = IORING_FEAT_SINGLE_MMAP | IORING_FEAT_NODROP | IORING_FEAT_EXT_ARG;  // 5.11

constexpr std::uint64_t kBufferBytesMax = 1u << 30;  // the kernel registers no larger one
constexpr std::uint64_t kPauseNs = 1'000'000;        // when the kernel has no memory for requests

int ring_setup(std::uint32_t entries, io_uring_params* params) {
  return static_cast<int>(::syscall(SYS_io_uring_setup, entries, params));
}

int ring_enter(int ring, std::uint32_t submit, std::uint32_t wait, std::uint32_t flags, const void* argument,
               std::size_t size) {
  return static_cast<int>(::syscall(SYS_io_uring_enter, ring, submit, wait, flags, argument, size));
}

int ring_register(int ring, std::uint32_t what, const void* argument, std::uint32_t count) {
  return static_cast<int>(::syscall(SYS_io_uring_register, ring, what, argument, count));
}

std::string because(const std::string& call, int error) { return call + ": " + std::strerror(error); }

std::atomic_ref<std::uint32_t> shared(std::uint32_t* word) { return std::atomic_ref<std::uint32_t>(*word); }

struct Descriptor {
  int value = -1;
  ~Descriptor() {
    if (value >= 0) ::close(value);
  }
};

struct Mapping {
  void* address = MAP_FAILED;
  std::size_t size = 0;
  bool map(int ring, std::size_t bytes, std::uint64_t offset) {
    size = bytes;
    address = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, ring, static_cast<off_t>(offset));
    return address != MAP_FAILED;
  }
  std::uint32_t* word(std::uint32_t offset) const {
    return reinterpret_cast<std::uint32_t*>(static_cast<char*>(address) + offset);
  }
  ~Mapping() {
    if (address != MAP_FAILED) ::munmap(address, size);
  }
};

class RingKernel final : public Kernel {
 public:
  // Empty when it worked, otherwise why not.
  std::string open(const Options& options) {
    // Each op in flight may have a cancel beside it; one more entry wakes us.
    const std::uint32_t entries = std::bit_ceil(2 * options.depth + 2);
    io_uring_params params{};
    for (const std::uint32_t flags : kFlagSets) {
      params = {};
      params.flags = flags | IORING_SETUP_CLAMP;
      ring_.value = ring_setup(entries, &params);
      if (ring_.value >= 0 || errno != EINVAL) break;  // EINVAL: an older kernel that does not know a flag
    }
    // ENOSYS: not in this kernel. EPERM: forbidden by seccomp or kernel.io_uring_disabled. ENOMEM: memlock before 5.12.
    if (ring_.value < 0) return because("io_uring_setup", errno);
    if ((params.features & kFeatures) != kFeatures) return "io_uring lacks features of Linux 5.11";
    const std::size_t sq_bytes = params.sq_off.array + params.sq_entries * sizeof(std::uint32_t);
    const std::size_t cq_bytes = params.cq_off.cqes + params.cq_entries * sizeof(io_uring_cqe);
    if (!rings_.map(ring_.value, std::max(sq_bytes, cq_bytes), IORING_OFF_SQ_RING)) return because("mmap", errno);
    if (!entries_.map(ring_.value, params.sq_entries * sizeof(io_uring_sqe), IORING_OFF_SQES)) return because("mmap", errno);
    sq_head_ = rings_.word(params.sq_off.head);
    sq_tail_ = rings_.word(params.sq_off.tail);
    cq_head_ = rings_.word(params.cq_off.head);
    cq_tail_ = rings_.word(params.cq_off.tail);
    sq_entries_ = params.sq_entries;
    cq_mask_ = params.cq_entries - 1;
    sqes_ = static_cast<io_uring_sqe*>(entries_.address);
    cqes_ = reinterpret_cast<io_uring_cqe*>(static_cast<char*>(rings_.address) + params.cq_off.cqes);
    std::uint32_t* const order = rings_.word(params.sq_off.array);
    for (std::uint32_t i = 0; i < sq_entries_; ++i) order[i] = i;
    wake_.value = ::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (wake_.value < 0) return because("eventfd", errno);
    files_ = options.files;
    // EMFILE and EBADF among others: plain descriptors then work, or say in each op why not.
    const auto count = static_cast<std::uint32_t>(files_.size());
    fixed_files_ = ring_register(ring_.value, IORING_REGISTER_FILES, files_.data(), count) == 0;
    return "";
  }

  // Pins the buffers. Empty when it worked or nothing was given. ENOMEM: the memlock limit. EFAULT: memory that cannot
  // be pinned. EOPNOTSUPP: a file's memory, on kernels that refuse it. Plain transfers work with all of them.
  std::string register_buffers(const Options& options) {
    for (const auto& [address, size] : options.buffers)
      for (std::uint64_t at = 0; at < size; at += kBufferBytesMax)
        buffers_.push_back({reinterpret_cast<void*>(address + at), std::min(size - at, kBufferBytesMax)});
    if (buffers_.empty()) return "";
    std::sort(buffers_.begin(), buffers_.end(), [](const iovec& a, const iovec& b) { return a.iov_base < b.iov_base; });
    const auto count = static_cast<std::uint32_t>(buffers_.size());
    if (ring_register(ring_.value, IORING_REGISTER_BUFFERS, buffers_.data(), count) == 0) return "";
    buffers_.clear();
    return because("registering buffers", errno);
  }

  bool push(const Request& request) override {
    io_uring_sqe* const sqe = next_entry();
    if (sqe == nullptr) return false;
    sqe->user_data = request.token;
    set_file(sqe, request.file);
    if (request.kind == Kind::kFlush) {
      sqe->opcode = IORING_OP_FSYNC;
      sqe->fsync_flags = IORING_FSYNC_DATASYNC;
      return true;
    }
    const bool is_read = request.kind == Kind::kRead;
    const int buffer = buffer_of(request);
    sqe->opcode = static_cast<std::uint8_t>(buffer < 0 ? (is_read ? IORING_OP_READ : IORING_OP_WRITE)
                                                       : (is_read ? IORING_OP_READ_FIXED : IORING_OP_WRITE_FIXED));
    if (buffer >= 0) sqe->buf_index = static_cast<std::uint16_t>(buffer);
    sqe->off = request.offset;
    sqe->addr = request.address;
    sqe->len = request.size;
    return true;
  }

  bool cancel(std::uint64_t token) override {
    io_uring_sqe* const sqe = next_entry();
    if (sqe == nullptr) return false;
    sqe->opcode = IORING_OP_ASYNC_CANCEL;
    sqe->fd = -1;
    sqe->addr = token;
    sqe->user_data = Token{0, Token::kCancel, 0}.packed();
    return true;
  }

  std::size_t exchange(Completion* out, std::size_t capacity, std::uint64_t wait_ns) override {
    if (!is_wake_armed_) arm_wake();
    shared(sq_tail_).store(tail_, std::memory_order_release);
    const std::uint32_t submit = tail_ - shared(sq_head_).load(std::memory_order_acquire);
    const bool has_completions = shared(cq_tail_).load(std::memory_order_acquire) != *cq_head_;
    if (submit > 0 || !has_completions) enter(submit, has_completions ? 0 : wait_ns);
    return reap(out, capacity);
  }

  void wake() override {
    const std::uint64_t one = 1;
    [[maybe_unused]] const ssize_t written = ::write(wake_.value, &one, sizeof one);  // fails only at 2^64 - 1 wakes
  }

  bool fixed_buffers() const override { return !buffers_.empty(); }
  std::uint64_t calls() const override { return calls_; }

 private:
  // One entry stays free for the wake.
  io_uring_sqe* next_entry(std::uint32_t kept_free = 1) {
    if (tail_ - shared(sq_head_).load(std::memory_order_acquire) + kept_free >= sq_entries_) return nullptr;
    io_uring_sqe* const sqe = &sqes_[tail_++ & (sq_entries_ - 1)];
    std::memset(sqe, 0, sizeof *sqe);
    return sqe;
  }

  void set_file(io_uring_sqe* sqe, std::uint32_t file) const {
    sqe->fd = fixed_files_ ? static_cast<int>(file) : files_[file];
    if (fixed_files_) sqe->flags = IOSQE_FIXED_FILE;
  }

  // The registered buffer that holds all of the memory; -1 without one.
  int buffer_of(const Request& request) const {
    const auto begins_behind = [](std::uint64_t address, const iovec& buffer) {
      return address < reinterpret_cast<std::uint64_t>(buffer.iov_base);
    };
    const auto behind = std::upper_bound(buffers_.begin(), buffers_.end(), request.address, begins_behind);
    if (behind == buffers_.begin()) return -1;
    const iovec& buffer = *(behind - 1);
    const std::uint64_t end = reinterpret_cast<std::uint64_t>(buffer.iov_base) + buffer.iov_len;
    return request.address + request.size <= end ? static_cast<int>(behind - 1 - buffers_.begin()) : -1;
  }

  // A poll of the counter of wakes, which completes when it is not zero. It writes no memory, so the ring can be closed
  // while it is armed.
  void arm_wake() {
    io_uring_sqe* const sqe = next_entry(0);
    if (sqe == nullptr) return;
    sqe->opcode = IORING_OP_POLL_ADD;
    sqe->fd = wake_.value;
    sqe->poll32_events = POLLIN;
    sqe->user_data = Token{0, Token::kWake, 0}.packed();
    is_wake_armed_ = true;
  }

  void disarm_wake() {
    std::uint64_t wakes;
    [[maybe_unused]] const ssize_t size = ::read(wake_.value, &wakes, sizeof wakes);  // back to zero; it never blocks
    is_wake_armed_ = false;
  }

  void enter(std::uint32_t submit, std::uint64_t wait_ns) {
    const auto whole = static_cast<long long>(wait_ns);
    const __kernel_timespec time{whole / 1'000'000'000, whole % 1'000'000'000};
    io_uring_getevents_arg argument{};
    argument.ts = wait_ns == kForever || wait_ns == 0 ? 0 : reinterpret_cast<std::uint64_t>(&time);
    ++calls_;
    const int result = ring_enter(ring_.value, submit, wait_ns == 0 ? 0 : 1, IORING_ENTER_GETEVENTS | IORING_ENTER_EXT_ARG,
                                  &argument, sizeof argument);
    if (result >= 0) return;
    switch (errno) {
      case ETIME:  // nothing came in time
      case EINTR:  // a debugger; our signals are blocked
        return;
      case EAGAIN:  // no memory for requests now
      case EBUSY:   // completions that found no room in the queue come first
        if (submit > 0 && wait_ns > 0) enter(0, std::min(wait_ns, kPauseNs));
        return;
      default:  // EBADF, EFAULT, EINVAL, ENXIO: our own mistake, and nobody would learn when memory is free again
        std::perror("io_uring_enter");
        std::abort();
    }
  }

  std::size_t reap(Completion* out, std::size_t capacity) {
    std::uint32_t head = *cq_head_;
    const std::uint32_t tail = shared(cq_tail_).load(std::memory_order_acquire);
    std::size_t count = 0;
    for (; head != tail && count < capacity; ++head) {
      const io_uring_cqe& cqe = cqes_[head & cq_mask_];
      if (Token::unpacked(cqe.user_data).use == Token::kWake) disarm_wake();
      else out[count++] = {cqe.user_data, cqe.res};
    }
    shared(cq_head_).store(head, std::memory_order_release);
    return count;
  }

  std::vector<int> files_;
  bool fixed_files_ = false;
  std::vector<iovec> buffers_;  // by address
  bool is_wake_armed_ = false;
  std::uint64_t calls_ = 0;
  std::uint32_t tail_ = 0;
  std::uint32_t *sq_head_ = nullptr, *sq_tail_ = nullptr, *cq_head_ = nullptr, *cq_tail_ = nullptr;
  std::uint32_t sq_entries_ = 0, cq_mask_ = 0;
  io_uring_sqe* sqes_ = nullptr;
  const io_uring_cqe* cqes_ = nullptr;
  Descriptor wake_;
  Mapping rings_, entries_;
  Descriptor ring_;
};

}  // namespace

OpenedKernel open_ring(const Options& options) {
  auto ring = std::make_unique<RingKernel>();
  OpenedKernel opened;
  opened.reason = ring->open(options);
  if (!opened.reason.empty()) return opened;
  opened.backend = "io_uring";
  opened.buffers_reason = ring->register_buffers(options);
  opened.kernel = std::move(ring);
  return opened;
}

}  // namespace h3::io
