import { Machine } from "./machine.js";
import { Talk } from "./talk.js";

new Machine(new Talk());
