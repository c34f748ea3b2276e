"""What tests share: helpers, fakes, the reference, and programs that tests start. There are no tests here."""
