#include "server/base/bytes.h"

#include "gtest/gtest.h"

namespace h3 {
namespace {

TEST(ByteCountTest, CountsAndCompares) {
  ByteCount bytes = MiB(1) + ByteCount(1);
  EXPECT_EQ(bytes.value(), 1'048'577);
  bytes -= ByteCount(1);
  EXPECT_EQ(bytes, MiB(1));
  bytes += GiB(80);
  EXPECT_EQ(bytes - GiB(80), MiB(1));
  EXPECT_LT(MiB(1023), GiB(1));
  EXPECT_EQ(ByteCount().value(), 0);
}

TEST(ByteCountTest, IsReadableAtEverySize) {
  EXPECT_EQ(Human(ByteCount(0)), "0 B");
  EXPECT_EQ(Human(ByteCount(1023)), "1023 B");
  EXPECT_EQ(Human(ByteCount(1536)), "1.5 KiB");
  EXPECT_EQ(Human(MiB(38220)), "38220.0 MiB");
  EXPECT_EQ(Human(GiB(141)), "141.0 GiB");
}

}  // namespace
}  // namespace h3
