// SPDX-License-Identifier: Apache-2.0

#ifndef TRANSFORMER_ENGINE_OVERLAY_NATIVE_PRINTABLE_H_
#define TRANSFORMER_ENGINE_OVERLAY_NATIVE_PRINTABLE_H_

#include <string>

namespace transformer_engine {
namespace thd_rope {

// What the environment holds, for a message: any bytes, of which Python takes UTF-8 only.
inline std::string printable(const std::string &text) {
  constexpr char kDigits[] = "0123456789abcdef";
  std::string result;
  for (const unsigned char byte : text) {
    if (byte >= 0x20 && byte < 0x7f) {
      result += static_cast<char>(byte);
    } else {
      result += {'\\', 'x', kDigits[byte >> 4], kDigits[byte & 15]};
    }
  }
  return result;
}

}  // namespace thd_rope
}  // namespace transformer_engine

#endif  // TRANSFORMER_ENGINE_OVERLAY_NATIVE_PRINTABLE_H_
