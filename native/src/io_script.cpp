// A kernel whose faults are written down beforehand. It carries requests out at once, and tells of them one visit later.
#include <sys/types.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "h3/io_kernel.hpp"
#include "io_inbox.hpp"
#include "io_transfer.hpp"

namespace h3::io {
namespace {

class ScriptKernel final : public Kernel {
 public:
  explicit ScriptKernel(const Options& options) : files_(options.files), faults_(options.faults) {}

  bool push(const Request& request) override {
    if (const Fault* full = fault(Fault::kFull); full != nullptr && refused_ < full->value) {
      ++refused_;
      return false;
    }
    refused_ = 0;
    if (fault(Fault::kStale) != nullptr) inbox_.add({request.token - (std::uint64_t{1} << 32), request.size});
    if (fault(Fault::kHold) != nullptr || fault(Fault::kLate) != nullptr) {
      held_.push_back({request, fault(Fault::kLate) != nullptr});
    } else {
      const Completion completion{request.token, carry_out(request)};
      inbox_.add(completion);
      if (fault(Fault::kRepeat) != nullptr) inbox_.add(completion);
    }
    ++taken_;
    return true;
  }

  bool cancel(std::uint64_t token) override {
    const auto found = std::find_if(held_.begin(), held_.end(), [&](const Held& h) { return h.request.token == token; });
    inbox_.add({Token{0, Token::kCancel, 0}.packed(), found == held_.end() ? -ENOENT : 0});
    if (found == held_.end()) return true;
    inbox_.add({token, found->is_late ? transfer(found->request, files_[found->request.file]) : -ECANCELED});
    held_.erase(found);
    return true;
  }

  std::size_t exchange(Completion* out, std::size_t capacity, std::uint64_t wait_ns) override {
    ++calls_;
    return inbox_.take(out, capacity, wait_ns);
  }

  void wake() override { inbox_.wake(); }
  std::uint64_t calls() const override { return calls_; }

 private:
  struct Held {
    Request request;
    bool is_late;
  };

  // What the script says about the next request to be taken.
  const Fault* fault(Fault::Effect effect) const {
    for (const Fault& fault : faults_)
      if (fault.effect == effect && taken_ >= fault.first && taken_ - fault.first < fault.count) return &fault;
    return nullptr;
  }

  std::int64_t carry_out(Request request) const {
    const int file = files_[request.file];
    if (const Fault* error = fault(Fault::kError)) return -static_cast<std::int64_t>(error->value);
    if (const Fault* torn = fault(Fault::kTorn)) {
      request.size /= 2;
      transfer(request, file);
      return -static_cast<std::int64_t>(torn->value);
    }
    if (const Fault* cut = fault(Fault::kShort); cut != nullptr && cut->value < request.size)
      return carry_out_part(request, file, static_cast<std::uint32_t>(cut->value));
    const std::int64_t result = transfer(request, file);
    if (const Fault* flip = fault(Fault::kFlip); flip != nullptr && static_cast<std::int64_t>(flip->value) < result)
      invert(request, file, flip->value);
    return result;
  }

  // A direct read ends at any byte only where the file ends, so the whole is read and what lies behind is spoiled.
  static std::int64_t carry_out_part(Request request, int file, std::uint32_t bytes) {
    if (bytes == 0) return 0;
    if (request.kind != Kind::kRead) {
      request.size = bytes;
      return transfer(request, file);
    }
    const std::int64_t result = std::min<std::int64_t>(transfer(request, file), bytes);
    std::memset(reinterpret_cast<char*>(request.address) + bytes, 0xdb, request.size - bytes);
    return result;
  }

  static void invert(const Request& request, int file, std::uint64_t at) {
    unsigned char byte = static_cast<unsigned char>(~reinterpret_cast<const unsigned char*>(request.address)[at]);
    if (request.kind == Kind::kRead) reinterpret_cast<unsigned char*>(request.address)[at] = byte;
    else [[maybe_unused]] const ssize_t written = ::pwrite(file, &byte, 1, static_cast<off_t>(request.offset + at));
  }

  const std::vector<int> files_;
  const std::vector<Fault> faults_;
  std::uint64_t taken_ = 0, refused_ = 0, calls_ = 0;
  std::vector<Held> held_;
  Inbox inbox_;
};

}  // namespace

std::unique_ptr<Kernel> open_script(const Options& options) { return std::make_unique<ScriptKernel>(options); }

}  // namespace h3::io
